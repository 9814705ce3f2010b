"""Patches: the same files as git's own, and refusals where git refuses."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from workflows.errors import TaskDataError
from workflows.tasks.swe import patches


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-c", "core.autocrlf=false", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout.decode()


def repository(folder: Path, before: dict[str, str], after: dict[str, str]) -> str:
    """A repository at `before`; returns git's patch to `after`."""
    folder.mkdir()
    git(folder, "init", "-q")
    for files in (before, after):
        for path in [p for p in folder.rglob("*") if p.is_file() and ".git" not in p.parts]:
            path.unlink()
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, newline="")
        git(folder, "add", "-Af")
        git(folder, "commit", "-qm", "x", "--allow-empty")
    patch = git(folder, "diff", "-M", "HEAD~", "HEAD")
    git(folder, "reset", "-q", "--hard", "HEAD~")
    return patch


def applied(folder: Path, patch: str) -> dict[str, str]:
    """What the files are after our own application."""
    files = {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and ".git" not in p.parts
    }
    for name, content in patches.apply(patch, files.get).items():
        if content is None:
            del files[name]
        else:
            files[name] = content
    return {name: content.decode() for name, content in files.items()}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": "1\n2\n3\n"}, {"a": "1\nx\n3\n"}),
        ({"a": "1\n2"}, {"a": "1\n2\n"}),
        ({"a": "1\n2\n"}, {"a": "1\n2"}),
        ({"a": "1\n"}, {"b/c": "1\n"}),
        ({"a": "1\n" * 30}, {"b": "1\n" * 30 + "2\n"}),
        ({"a": "1\n"}, {"a": "1\n", "new": "x\n\ny"}),
        ({"a": "1\n", "gone": "x\n"}, {"a": "1\n"}),
        ({"a": "x\r\ny\r\n"}, {"a": "x\r\nz\r\n"}),
        ({"a b": "1\n"}, {"a b": "2\n"}),
        ({"ä": "1\n"}, {"ä": "2\n"}),
        ({"a": "1\n"}, {"a": "1\n", "empty": ""}),
        ({"a": "-- x\n++ y\n"}, {"a": "-- z\n++ w\n"}),
    ],
)
def test_files_are_what_git_makes_of_them(before: dict[str, str], after: dict[str, str], tmp_path: Path) -> None:
    patch = repository(tmp_path / "r", before, after)
    assert applied(tmp_path / "r", patch) == after


@pytest.mark.parametrize("seed", range(6))
def test_random_edits_are_applied_as_by_git(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    lines = [f"{dice.randrange(4)}\n" for _ in range(120)]
    edited = list(lines)
    for _ in range(12):
        place = dice.randrange(len(edited))
        edited[place : place + dice.randrange(3)] = [f"{dice.randrange(4)}\n" for _ in range(dice.randrange(3))]
    patch = repository(tmp_path / "r", {"a": "".join(lines)}, {"a": "".join(edited)})
    assert applied(tmp_path / "r", patch) == {"a": "".join(edited)}


def test_a_hunk_is_found_where_the_file_has_moved_on() -> None:
    patch = "--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n x\n-y\n+z\n"
    assert patches.apply(patch, {"f": b"1\n2\n3\nx\ny\n"}.get) == {"f": b"1\n2\n3\nx\nz\n"}


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("--- a/f\n+++ b/f\n@@ -1,1 +1,1 @@\n-other\n+z\n", "does not fit"),
        ("--- a/none\n+++ b/none\n@@ -1,1 +1,1 @@\n-x\n+z\n", "which is not there"),
        ("--- a/f\n+++ b/f\n@@ -1,2 +1,1 @@\n-x\n", "ends after 1 of 2 old"),
        ("nothing of the kind", "it has no file"),
        ("diff --git a/f b/f\nindex 1..2\nBinary files a/f and b/f differ\n", "binary"),
    ],
)
def test_what_does_not_apply_is_refused_by_name(patch: str, said: str) -> None:
    with pytest.raises(TaskDataError, match=said):
        patches.apply(patch, {"f": b"x\n"}.get)
