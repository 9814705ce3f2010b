"""A small instance of task=swe, made here: a package of two versions, its archive, its patches, its row."""

from __future__ import annotations

import difflib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PACKAGE = "src/tally/__init__.py"
TESTS = "tests/test_tally.py"

BASE = '''"""Counts words."""


def count(text):
    """How often each word is in the text."""
    words = text.lower().split()
    return {word: words.count(word) for word in words}


def top(text, number=1):
    """The most frequent words."""
    counts = count(text)
    return sorted(counts, key=counts.get)[:number]


class Page:
    """Some text."""

    def __init__(self, text):
        self.text = text

    def __eq__(self, other):
        return isinstance(other, Page) and count(self.text) == count(other.text)
'''
FIXED = BASE.replace(
    "key=counts.get)", "key=lambda dunlin_in_the_patch: (-counts[dunlin_in_the_patch], dunlin_in_the_patch))"
)
SECRETS = ("dunlin_in_the_patch", "godwit_in_the_tests", "test_top_is_told")
"""Names that stand in private columns alone: of the patch, of the hidden tests, of one that they expect."""

SEEN_TESTS = """import tally


def test_count():
    assert tally.count("a b A") == {"a": 2, "b": 1}


def test_page():
    assert tally.Page("a b") == tally.Page("b a")
"""
HIDDEN_TESTS = (
    "import pytest\n\n"
    + SEEN_TESTS
    + '''

@pytest.mark.parametrize(("number", "wanted"), [(1, ["b"]), (2, ["b", "a"])])
def test_top(number, wanted):
    assert tally.top("a b b c", number) == wanted


def test_top_is_told(capsys):
    """A test with a description."""
    print(tally.top("x y y"))
    assert capsys.readouterr().out == "['y']\\n"


class TestEnds:
    def test_nothing(self):
        godwit_in_the_tests = tally.top("")
        if godwit_in_the_tests:
            raise AssertionError
'''
)

FILES: Mapping[str, str] = {
    PACKAGE: BASE,
    TESTS: SEEN_TESTS,
    "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef word():\n    return 'word'\n",
    "setup.cfg": "[metadata]\nname = tally\nversion = 1.0\n\n[tool:pytest]\nfilterwarnings = error\n",
    "README": "Counts words.\n",
}
FAIL_TO_PASS = [f"{TESTS}::test_top[1-wanted0]", f"{TESTS}::test_top[2-wanted1]", f"{TESTS}::test_top_is_told"]
PASS_TO_PASS = [f"{TESTS}::test_count", f"{TESTS}::test_page", f"{TESTS}::TestEnds::test_nothing"]


def diff(path: str, before: str, after: str) -> str:
    """One file's change as git writes it."""
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n{''.join(lines)}"


def write_archive(path: Path, files: Mapping[str, str | bytes] = FILES) -> Path:
    """A .tar.gz of these files."""
    with tarfile.open(path, "w:gz") as tar:
        top = tarfile.TarInfo("./")
        top.type, top.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(top)
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(f"./{name}")
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    return path


def row(instance_id: str = "tally-1", **changes: Any) -> dict[str, Any]:
    """The row; `changes` replace columns, and None takes one away."""
    whole = {
        "instance_id": instance_id, "repo": "someone/tally", "version": "1.0", "base_commit": "1.0",
        "problem_statement": "top() gives the rarest words first.", "patch": diff(PACKAGE, BASE, FIXED),
        "test_patch": diff(TESTS, SEEN_TESTS, HIDDEN_TESTS), "FAIL_TO_PASS": json.dumps(FAIL_TO_PASS),
        "PASS_TO_PASS": PASS_TO_PASS, "test_files": [TESTS], "source_root": "src/", "archive": "tally.tar.gz",
        "requirements": ["pytest<9"],
    }  # fmt: skip
    return {name: value for name, value in {**whole, **changes}.items() if value is not None}


def write(folder: Path, rows: Iterable[Mapping[str, Any] | str]) -> Path:
    """The data file with its archive beside it; a text is written as it is."""
    write_archive(folder / "tally.tar.gz")
    path = folder / "instances.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in rows))
    return path
