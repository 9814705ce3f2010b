"""Unified diffs: what is read, where hunks go, and what is refused."""

from __future__ import annotations

import difflib
import random

import pytest

from sandbox.history import Before
from sandbox.patches import Patched, apply, parse

GIT = b"""diff --git a/src/a.py b/src/a.py
index 1..2 100644
--- a/src/a.py
+++ b/src/a.py
@@ -1,3 +1,3 @@ def f():
 one
-two
+2
 three
diff --git a/new b/new
new file mode 100755
--- /dev/null
+++ b/new
@@ -0,0 +1 @@
+hello
\\ No newline at end of file
diff --git a/gone b/gone
--- a/gone
+++ /dev/null
@@ -1 +0,0 @@
-bye
diff --git a/old name b/other
similarity index 100%
rename from old name
rename to other
"""


def test_what_git_writes_is_read() -> None:
    changed, new, gone, renamed = parse(GIT)
    assert (changed.source, changed.target) == ("src/a.py", "src/a.py")
    assert apply(changed, b"one\ntwo\nthree\n") == b"one\n2\nthree\n"
    assert (new.source, new.target, new.mode) == (None, "new", 0o755) and apply(new, b"") == b"hello"
    assert gone.target is None and apply(gone, b"bye\n") == b""
    assert (renamed.source, renamed.target, renamed.kind) == ("old name", "other", "rename")


def test_a_hunk_goes_to_the_nearest_place_where_its_lines_are() -> None:
    (patch,) = parse(b"--- a\n+++ a\n@@ -2,2 +2,2 @@\n x\n-y\n+z\n")
    assert apply(patch, b"0\n0\n0\nx\ny\n") == b"0\n0\n0\nx\nz\n"
    assert apply(patch, b"x\ny\n0\nx\ny\n") == b"x\nz\n0\nx\ny\n"
    with pytest.raises(ValueError, match=r"hunk 1 \(line 2\) does not fit: its lines, beginning with 'x'"):
        apply(patch, b"x\n0\ny\n")


def test_line_ends_and_a_missing_last_newline_are_kept() -> None:
    (patch,) = parse(b"--- a\n+++ a\n@@ -1 +1 @@\n-a\r\n+b\r\n")
    assert apply(patch, b"a\r\nc") == b"b\r\nc"
    (patch,) = parse(b"--- a\n+++ a\n@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+a\n")
    assert apply(patch, b"a") == b"a\n"


@pytest.mark.parametrize(
    ("diff", "said"),
    [
        (b"hello\n", "no file"),
        (b"--- a\n+++ a\n@@ -1,3 +1,3 @@\n x\n", "ends after 1 of 3 old"),
        (b"diff --git a/x b/x\nGIT binary patch\n", "binary"),
        (b"--- a\n+++ a\n@@ -1,2 +1 @@\n x\n y\n", "more lines than the 2 old and 1 new"),
        (b"--- a\n+++ a\n@@ -1 +1 @@\n-x\n+y\n+z\n", "more lines than"),
        (b"--- a\n+++ a\n@@ -1 +1 @@\n-x\n+y\n z\n", "more lines than"),
        (b"diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n", "symbolic link"),
        (b"diff --git a/l b/l\nindex 1234567..89abcde 160000\n--- a/l\n+++ b/l\n", "submodule"),
    ],
)
def test_what_is_no_whole_diff_is_refused(diff: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(diff)


@pytest.mark.parametrize("seed", range(40))
def test_the_diff_of_two_texts_makes_one_of_the_other(seed: int) -> None:
    rng = random.Random(seed)
    before = [f"{rng.randrange(6)}\n" for _ in range(rng.randrange(30))]
    after = [line for line in before if rng.random() > 0.2]
    for _ in range(rng.randrange(4)):
        after.insert(rng.randrange(len(after) + 1), f"new {rng.randrange(3)}\n")
    diff = "".join(difflib.unified_diff(before, after, "a/f", "b/f", n=rng.randrange(4)))
    if diff:
        (patch,) = parse(diff.encode())
        assert apply(patch, "".join(before).encode()) == "".join(after).encode()


def after(diff: bytes, **files: bytes) -> dict[str, bytes | None]:
    patched = Patched(parse(diff), lambda name: Before(f"/{name}", files.get(name), 0o644))
    return {path: data for path, (data, _) in patched.afters.items()}


def test_a_line_far_outside_and_a_file_of_equal_lines_cost_little() -> None:
    (far,) = parse(b"--- a\n+++ a\n@@ -1000000000000 +1000000000000 @@\n-x\n+y\n")
    assert apply(far, b"0\nx\n") == b"0\ny\n"
    with pytest.raises(ValueError, match="does not fit"):
        apply(far, b"")
    many = b"--- a\n+++ a\n@@ -1,10001 +0,0 @@\n" + b"-x\n" * 10_000 + b"-y\n"
    with pytest.raises(ValueError, match="too many places"):
        apply(parse(many)[0], b"x\n" * 40_000)


def test_what_has_no_hunks_is_done_too() -> None:
    diff = b"""diff --git a/empty b/empty
new file mode 100644
index 0000000..e69de29
diff --git a/gone b/gone
deleted file mode 100644
index e69de29..0000000
diff --git a/run b/run
old mode 100644
new mode 100755
"""
    assert after(diff, gone=b"", run=b"x") == {"/empty": b"", "/gone": None, "/run": b"x"}
    assert parse(diff)[2].mode == 0o755
    assert after(b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n-- \n2.39.2\n", f=b"x\n") == {"/f": b"y\n"}


def test_renames_are_of_what_was_there_and_never_over_another_file() -> None:
    swap = b"diff --git a/a b/b\nrename from a\nrename to b\ndiff --git a/b b/a\nrename from b\nrename to a\n"
    assert after(swap, a=b"1", b=b"2") == {"/a": b"2", "/b": b"1"}
    with pytest.raises(FileExistsError):
        after(swap.partition(b"\ndiff")[0] + b"\n", a=b"1", b=b"2")
    with pytest.raises(FileExistsError):
        after(b"diff --git a/a b/b\ncopy from a\ncopy to b\n", a=b"1", b=b"2")
