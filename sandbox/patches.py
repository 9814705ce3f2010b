"""Unified diffs: read, and applied to the bytes of files, hunk by hunk, wholly or not at all. Pure.

A hunk goes where its lines are: at the line that it names, else at the nearest place above or below it; lines of
context are never left out of the comparison.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_ABSENT = b"/dev/null"
_NO_NEWLINE = b"\\ "


@dataclass
class Hunk:
    """One block of changes: lines that must be there, from line `at` (1 is the first), and those that replace them."""

    at: int
    old: list[bytes] = field(default_factory=list)
    new: list[bytes] = field(default_factory=list)


@dataclass
class FilePatch:
    """The changes of one file.

    Args:
        source: its path before; None where it is new.
        target: its path afterwards; None where it is removed.
        kind: what becomes of the source: the names of a "change" may differ by an ending such as .orig alone.
        mode: the permission bits that it gets; None where they stay.
        hunks: in the order of their lines.
    """

    source: str | None
    target: str | None
    kind: Literal["change", "rename", "copy"] = "change"
    mode: int | None = None
    hunks: list[Hunk] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For messages."""
        return self.target or self.source or "?"


def parse(diff: bytes) -> list[FilePatch]:
    """The files of a diff as `diff -u` and `git diff` write it; what stands between them is passed over.

    Raises:
        ValueError: it has no file, a hunk that is not whole, or a binary change.
    """
    lines = [line + b"\n" for line in diff.split(b"\n")]
    if lines and lines[-1] == b"\n":
        lines.pop()
    found: list[FilePatch] = []
    moved: dict[bytes, str] = {}
    mode: int | None = None
    at = 0
    while at < len(lines):
        line = lines[at].rstrip(b"\r\n")
        at += 1
        if line.startswith(b"diff --git "):
            _take_moved(found, moved, mode)
            moved, mode = {}, None
        elif line.startswith((b"rename from ", b"rename to ", b"copy from ", b"copy to ")):
            kind, word, name = line.split(b" ", 2)
            moved[word] = _unquoted(name)
            moved[b"kind"] = kind.decode()
        elif line.startswith((b"new file mode ", b"new mode ")):
            mode = int(line.rpartition(b" ")[2], 8) & 0o777
        elif line.startswith((b"GIT binary patch", b"Binary files ")):
            raise ValueError("it changes a binary file, which no unified diff can")
        elif line.startswith(b"--- ") and at < len(lines) and lines[at].startswith(b"+++ "):
            source, target = _name(line[4:]), _name(lines[at].rstrip(b"\r\n")[4:])
            kept, moved, at = moved, {}, at + 1
            found.append(FilePatch(source, target, _kind(kept), mode))
            while at < len(lines) and (match := _HUNK.match(lines[at])):
                hunk, at = _hunk(lines, at + 1, match, found[-1].name)
                found[-1].hunks.append(hunk)
            mode = None
    _take_moved(found, moved, mode)
    if not found:
        raise ValueError("it has no file: each needs a line `--- a/PATH` and a line `+++ b/PATH`")
    return found


def _take_moved(found: list[FilePatch], moved: dict[bytes, str], mode: int | None) -> None:
    """A file that only gets another name has no `---` line."""
    if {b"from", b"to"} <= moved.keys():
        found.append(FilePatch(moved[b"from"], moved[b"to"], _kind(moved), mode))


def _kind(moved: dict[bytes, str]) -> Literal["change", "rename", "copy"]:
    match moved.get(b"kind"):
        case "rename":
            return "rename"
        case "copy":
            return "copy"
        case _:
            return "change"


def _hunk(lines: Sequence[bytes], at: int, match: re.Match[bytes], name: str) -> tuple[Hunk, int]:
    first, old_count, new_first, new_count = (int(group) if group is not None else 1 for group in match.groups())
    hunk = Hunk(first if old_count else first + 1)
    while len(hunk.old) < old_count or len(hunk.new) < new_count:
        line = lines[at] if at < len(lines) else b""
        kind, text = line[:1], line[1:]
        if line == b"\n":  # an editor took away the blank of an empty line of context
            kind, text = b" ", b"\n"
        if kind not in (b" ", b"-", b"+"):
            raise ValueError(
                f"{name}: the hunk at line {new_first} ends after {len(hunk.old)} of {old_count} old and "
                f"{len(hunk.new)} of {new_count} new lines"
            )
        if kind in b" -":
            hunk.old.append(text)
        if kind in b" +":
            hunk.new.append(text)
        at += 1
        if at < len(lines) and lines[at].startswith(_NO_NEWLINE):
            for side, marked in ((hunk.old, b" -"), (hunk.new, b" +")):
                if kind in marked:
                    side[-1] = side[-1].removesuffix(b"\n")
            at += 1
    return hunk, at


def _name(text: bytes) -> str | None:
    """The path in a `---` or `+++` line, without a date and git's `a/` or `b/`; None where there is none."""
    bare = text.partition(b"\t")[0].strip()
    if bare == _ABSENT:
        return None
    name = _unquoted(bare)
    return name[2:] if name.startswith(("a/", "b/")) else name


def _unquoted(name: bytes) -> str:
    """Git puts names with odd bytes in double quotes, as C would."""
    if len(name) > 1 and name[:1] == name[-1:] == b'"':
        name = name[1:-1].decode("latin-1").encode("latin-1").decode("unicode_escape").encode("latin-1")
    return name.decode("utf-8", "surrogateescape")


def apply(patch: FilePatch, data: bytes) -> bytes:
    """The file's bytes after the patch.

    Raises:
        ValueError: a hunk's lines are nowhere; the message names it and shows its first line.
    """
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    if not lines[-1]:
        lines.pop()
    result: list[bytes] = []
    done = 0
    for number, hunk in enumerate(patch.hunks, 1):
        at = _place(lines, hunk.old, hunk.at - 1, done)
        if at is None:
            shown = hunk.old[0].decode("utf-8", "replace").rstrip("\n")[:120] if hunk.old else ""
            raise ValueError(
                f"{patch.name}: hunk {number} (line {hunk.at}) does not fit: its lines, beginning with {shown!r}, are "
                "not there"
            )
        result += lines[done:at]
        result += hunk.new
        done = at + len(hunk.old)
    return b"".join([*result, *lines[done:]])


def _place(lines: Sequence[bytes], wanted: Sequence[bytes], expected: int, earliest: int) -> int | None:
    """Where `wanted` stands, nearest to `expected`, not before `earliest`."""
    latest = len(lines) - len(wanted)
    if not wanted:
        return min(max(expected, earliest), len(lines))
    for distance in range(max(abs(expected - earliest), abs(latest - expected)) + 1):
        for at in {expected - distance, expected + distance}:
            if earliest <= at <= latest and lines[at] == wanted[0] and list(lines[at : at + len(wanted)]) == wanted:
                return at
    return None
