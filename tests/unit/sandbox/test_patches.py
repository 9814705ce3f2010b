"""Unified diffs: what is read, where hunks go, and what is refused."""

from __future__ import annotations

import difflib
import random

import pytest

from sandbox.patches import apply, parse

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
