"""Applies a git-style patch to the text of files: whole files out, so that nothing of a workspace is trusted for them.

Written here because the place where a hidden patch is applied must be one where no agent was, and a worker need not
have git. Hunks apply where their context is found, nearest to the line they name; there is no fuzz. Format: git's
"Generating patch text with -p", which adds names for new, deleted and renamed files to the unified diff.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from workflows.errors import TaskDataError

Read = Callable[[str], bytes | None]
"""The content of a file by its path from the repository's root, or None where there is none."""

_HUNK: Final = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_DIFF: Final = b"diff --git "


class _Change(msgspec.Struct):
    old: str | None = None
    new: str | None = None
    renamed: bool = False
    binary: bool = False
    hunks: list[tuple[int, list[bytes], list[bytes]]] = []


def apply(patch: str, read: Read) -> dict[str, bytes | None]:
    """The files that the patch touches as they are afterwards; None for one that it deletes.

    Args:
        patch: may be empty: then nothing changes.
        read: the files before.

    Raises:
        TaskDataError: the patch is none, or does not fit the files, or holds binary content.
    """
    after: dict[str, bytes | None] = {}
    for change in _changes(patch.encode()):
        name = change.new or change.old
        if change.binary:
            raise TaskDataError(f"patch: {name} is binary, which needs the whole file")
        before = b"" if change.old is None else after.get(change.old) or read(change.old)
        if before is None:
            raise TaskDataError(f"patch: {change.old} is not there")
        if change.new is None:
            after[str(change.old)] = None
            continue
        if change.renamed and change.old is not None:
            after[change.old] = None
        after[change.new] = _patched(change, before)
    return after


def paths(patch: str) -> list[str]:
    """The files that a patch touches, by their old and new names."""
    names = [name for change in _changes(patch.encode()) for name in (change.old, change.new) if name]
    return list(dict.fromkeys(names))


def _patched(change: _Change, before: bytes) -> bytes:
    lines = re.findall(rb"[^\n]*\n|[^\n]+", before)
    shift, least = 0, 0
    for start, old, new in change.hunks:
        place = _place(lines, old, max(start - 1, 0) + shift if old else start + shift, least)
        if place is None:
            raise TaskDataError(f"patch: {change.new}: the hunk for line {start} does not fit")
        lines[place : place + len(old)] = new
        shift = place + len(new) - len(old) - (max(start - 1, 0) if old else start)
        least = place + len(new)
    return b"".join(lines)


def _place(lines: list[bytes], old: list[bytes], wanted: int, least: int) -> int | None:
    """Where the old lines stand, nearest to the wanted place."""
    last = len(lines) - len(old)
    if last < least:
        return None
    for place in sorted(range(least, last + 1), key=lambda place: abs(place - wanted)):
        if lines[place : place + len(old)] == old:
            return place
    return None


def _changes(patch: bytes) -> list[_Change]:
    changes: list[_Change] = []
    lines = iter(_lines(patch))
    for line in lines:
        if line.startswith(_DIFF):
            changes.append(_Change(*_header_names(line), hunks=[]))
            continue
        if line.startswith(b"--- ") and (not changes or changes[-1].hunks):
            changes.append(_Change(hunks=[]))  # a plain unified diff has no "diff --git" line
        if not changes:
            continue
        _read_line(changes[-1], line, lines)
    if patch.strip() and not changes:
        raise TaskDataError(f"patch: no diff in it: {patch[:60].decode(errors='replace')!r}")
    return changes


def _read_line(change: _Change, line: bytes, lines: Iterator[bytes]) -> None:
    match = _HUNK.match(line)
    if match:
        change.hunks.append(_hunk(match, lines))
    elif line.startswith(b"--- "):
        change.old = _name(line[4:], "a/")
    elif line.startswith(b"+++ "):
        change.new = _name(line[4:], "b/")
    elif line.startswith(b"new file mode"):
        change.old = None
    elif line.startswith(b"deleted file mode"):
        change.new = None
    elif line.startswith(b"rename from "):
        change.old, change.renamed = _unquoted(line[12:]), True
    elif line.startswith(b"rename to "):
        change.new = _unquoted(line[10:])
    elif line.startswith((b"GIT binary patch", b"Binary files ")):
        change.binary = True


def _lines(patch: bytes) -> list[bytes]:
    """The patch's lines; one that a "No newline at end of file" follows has none."""
    lines: list[bytes] = []
    for line in re.findall(rb"[^\n]*\n|[^\n]+", patch):
        if line.startswith(b"\\") and lines:
            lines[-1] = lines[-1].removesuffix(b"\n")
        else:
            lines.append(line)
    return lines


def _hunk(match: re.Match[bytes], lines: Iterator[bytes]) -> tuple[int, list[bytes], list[bytes]]:
    old: list[bytes] = []
    new: list[bytes] = []
    want_old, want_new = int(match[2] or 1), int(match[4] or 1)
    while len(old) < want_old or len(new) < want_new:
        line = next(lines, b"")
        # Some tools strip the blank of an empty context line.
        mark, text = (b" ", line) if line == b"\n" else (line[:1], line[1:])
        if mark not in (b" ", b"-", b"+") or not line:
            raise TaskDataError(f"patch: a hunk ends early, at {line[:40].decode(errors='replace')!r}")
        if mark != b"+":
            old.append(text)
        if mark != b"-":
            new.append(text)
    return int(match[1]), old, new


def _header_names(line: bytes) -> tuple[str | None, str | None]:
    """Both names of a "diff --git" line, which stand alone where a file is empty or only its mode changes."""
    text = line[len(_DIFF) :].decode(errors="surrogateescape").rstrip("\n")
    half = len(text) // 2
    if text[:half] == text[half + 1 :].replace("b/", "a/", 1) and not text.startswith('"'):
        return text[2:half], text[half + 3 :]
    old, _, new = text.partition(" b/")
    return old.removeprefix("a/"), new


def _name(raw: bytes, prefix: str) -> str | None:
    name = _unquoted(raw)
    return None if name == "/dev/null" else name.removeprefix(prefix)


def _unquoted(raw: bytes) -> str:
    """A name as git writes it: in quotes and with C escapes where it holds unusual bytes; dates after a tab go."""
    raw = raw.rstrip(b"\r\n")
    if raw.startswith(b'"'):
        escaped = raw.rpartition(b'"')[0][1:]
        return escaped.decode("unicode_escape").encode("latin-1").decode(errors="surrogateescape")
    return raw.partition(b"\t")[0].decode(errors="surrogateescape")
