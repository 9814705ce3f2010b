"""Unified diffs: read, and applied to the bytes of files, hunk by hunk, wholly or not at all. Pure.

A hunk goes where its lines are: at the line that it names, else at the nearest place above or below it; lines of
context are never left out of the comparison.
"""

from __future__ import annotations

import errno
import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sandbox.history import Before

EFFORT_LINES = 20_000_000
"""Comparisons of lines for one diff, some two seconds; an honest diff takes about as many as it has lines."""
_LINKS = (b"120000", b"160000")
"""Modes of symbolic links and of submodules."""
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_MODE = re.compile(rb"(old mode|new mode|new file mode|deleted file mode|index [0-9a-f]+\.\.[0-9a-f]+) ([0-7]+)$")
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


@dataclass
class Effort:
    """Comparisons of lines that are left to a diff, however many files it has."""

    left: int = EFFORT_LINES

    def spend(self, lines: int, name: str) -> None:
        """Raises ValueError where nothing is left."""
        self.left -= lines
        if self.left < 0:
            raise ValueError(f"{name}: its hunks have too many places to look at: name the lines where they belong")


@dataclass
class _Header:
    """What git says of a file before its hunks, or in place of them."""

    names: tuple[str, str] | None = None
    moved: dict[bytes, str] = field(default_factory=dict)
    mode: int | None = None
    fate: Literal["new", "deleted", "kept"] = "kept"

    @property
    def kind(self) -> Literal["change", "rename", "copy"]:
        match self.moved.get(b"kind"):
            case "rename":
                return "rename"
            case "copy":
                return "copy"
            case _:
                return "change"

    def alone(self) -> FilePatch | None:
        """The patch of a file without hunks: a new name, a new or removed empty file, or a new mode."""
        if {b"from", b"to"} <= self.moved.keys():
            return FilePatch(self.moved[b"from"], self.moved[b"to"], self.kind, self.mode)
        if self.names is None or (self.mode is None and self.fate == "kept"):
            return None
        source, target = self.names
        return FilePatch(
            None if self.fate == "new" else source, None if self.fate == "deleted" else target, mode=self.mode
        )


def parse(diff: bytes) -> list[FilePatch]:
    """The files of a diff as `diff -u` and `git diff` write it; what stands between them is passed over.

    Raises:
        ValueError: it has no file, a hunk that is not what its counts say, a binary change, a link or a submodule.
    """
    lines = [line + b"\n" for line in diff.split(b"\n")]
    if lines and lines[-1] == b"\n":
        lines.pop()
    found: list[FilePatch] = []
    header = _Header()
    at = 0
    while at < len(lines):
        line = lines[at].rstrip(b"\r\n")
        at += 1
        if line.startswith(b"diff --git "):
            found += filter(None, [header.alone()])
            header = _Header(_header_names(line))
        elif line.startswith((b"rename from ", b"rename to ", b"copy from ", b"copy to ")):
            kind, word, name = line.split(b" ", 2)
            header.moved |= {word: _unquoted(name), b"kind": kind.decode()}
        elif match := _MODE.match(line):
            if match[2] in _LINKS:
                raise ValueError(f"it has a symbolic link or a submodule ({line.decode()}): make it with a command")
            if match[1] in (b"new file mode", b"new mode"):
                header.mode = int(match[2], 8) & 0o777
            header.fate = {b"new file mode": "new", b"deleted file mode": "deleted"}.get(match[1], header.fate)  # type: ignore[assignment]
        elif line.startswith((b"GIT binary patch", b"Binary files ")):
            raise ValueError("it changes a binary file, which no unified diff can")
        elif line.startswith(b"--- ") and at < len(lines) and lines[at].startswith(b"+++ "):
            source, target = _name(line[4:]), _name(lines[at].rstrip(b"\r\n")[4:])
            at += 1
            found.append(FilePatch(source, target, header.kind, header.mode))
            while at < len(lines) and (match := _HUNK.match(lines[at])):
                hunk, at = _hunk(lines, at + 1, match, found[-1].name)
                found[-1].hunks.append(hunk)
            header = _Header()
    found += filter(None, [header.alone()])
    if not found:
        raise ValueError("it has no file: each needs a line `--- a/PATH` and a line `+++ b/PATH`")
    return found


def _header_names(line: bytes) -> tuple[str, str] | None:
    """Both names of a `diff --git` line; None where they cannot be told apart: they differ, and hold blanks."""
    text = line.removeprefix(b"diff --git ")
    if text.startswith(b'"'):
        first, _, second = text[1:].partition(b'" ')
        names = _name(b'"' + first + b'"'), _name(second)
    else:
        half = len(text) // 2
        if text[half : half + 1] != b" " or text[2:half] != text[half + 3 :]:
            return None
        names = _name(text[:half]), _name(text[half + 1 :])
    return (names[0], names[1]) if names[0] and names[1] else None


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
        if len(hunk.old) > old_count or len(hunk.new) > new_count:
            raise ValueError(f"{name}: {_more(new_first, old_count, new_count)}")
        at += 1
        if at < len(lines) and lines[at].startswith(_NO_NEWLINE):
            for side, marked in ((hunk.old, b" -"), (hunk.new, b" +")):
                if kind in marked:
                    side[-1] = side[-1].removesuffix(b"\n")
            at += 1
    if at < len(lines) and lines[at][:1] in (b" ", b"+", b"-") and not _ends_hunk(lines, at):
        raise ValueError(f"{name}: {_more(new_first, old_count, new_count)}")
    return hunk, at


def _more(first: int, old_count: int, new_count: int) -> str:
    return f"the hunk at line {first} has more lines than the {old_count} old and {new_count} new that it names"


def _ends_hunk(lines: Sequence[bytes], at: int) -> bool:
    """The next file's names, or the signature below a mailed patch."""
    following = lines[at + 1] if at + 1 < len(lines) else b""
    return (lines[at].startswith(b"--- ") and following.startswith(b"+++ ")) or lines[at].rstrip() == b"--"


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


def apply(patch: FilePatch, data: bytes, effort: Effort | None = None) -> bytes:
    """The file's bytes after the patch.

    Args:
        patch: of this file.
        data: its bytes before.
        effort: what is left to the whole diff; by default what one has.

    Raises:
        ValueError: a hunk's lines are nowhere, or in too many places; the message names it and shows its first line.
    """
    effort = effort or Effort()
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    if not lines[-1]:
        lines.pop()
    result: list[bytes] = []
    done = 0
    for number, hunk in enumerate(patch.hunks, 1):
        at = _place(lines, hunk.old, hunk.at - 1, done, lambda count: effort.spend(count, patch.name))
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


def _place(
    lines: list[bytes], wanted: list[bytes], expected: int, earliest: int, spend: Callable[[int], None]
) -> int | None:
    """Where `wanted` stands, nearest to `expected`, not before `earliest`."""
    latest = len(lines) - len(wanted)
    if latest < earliest:
        return None
    expected = min(max(expected, earliest), latest)
    if not wanted:
        return expected
    for distance in range(max(expected - earliest, latest - expected) + 1):
        spend(1)
        for at in {expected - distance, expected + distance}:
            if earliest <= at <= latest and lines[at] == wanted[0]:
                spend(len(wanted))
                if lines[at : at + len(wanted)] == wanted:
                    return at
    return None


class Patched:
    """What the files of a diff become, all of them, before any is written.

    Args:
        patches: of one diff.
        read: gives a file by its name in the diff, as it is now.

    Raises:
        ValueError: a patch does not fit.
        OSError: a file that is changed is not there, or one that is made is.

    Attributes:
        befores: files as they are, by their normalised path.
        afters: content and permission bits of those that the diff touches; no content: the file goes.
    """

    def __init__(self, patches: Sequence[FilePatch], read: Callable[[str], Before]) -> None:
        self._read, self._effort = read, Effort()
        self.befores: dict[str, Before] = {}
        self.afters: dict[str, tuple[bytes | None, int]] = {}
        # git names files as they were before the whole diff, so two of them may change places
        leaves = [one.source for one in patches if one.source and (one.kind == "rename" or one.target is None)]
        self._leaving = {self._key(name) for name in leaves}
        self._made: set[str] = set()
        for patch in patches:
            self._take(patch)

    def _key(self, name: str) -> str:
        before = self._read(name)
        key = posixpath.normpath(before.path)
        self.befores.setdefault(key, before)
        return key

    def _now(self, key: str) -> tuple[bytes | None, int]:
        before = self.befores[key]
        return self.afters.get(key, (before.data, before.mode))

    def _take(self, patch: FilePatch) -> None:
        if patch.kind == "change":
            self._change(patch)
        else:
            self._move(patch)

    def _change(self, patch: FilePatch) -> None:
        key = self._key(patch.name)
        if patch.source is not None and patch.target is not None and self._now(key)[0] is None:
            key = self._key(patch.source)
        data, mode = self._now(key)
        if patch.source is None and data:
            raise FileExistsError(errno.EEXIST, f"the patch makes {key}, which is there already", key)
        if patch.source is not None and data is None:
            raise FileNotFoundError(errno.ENOENT, f"the patch changes {key}, which is not there", key)
        changed = apply(patch, data or b"", self._effort)
        if patch.target is None and changed:
            raise ValueError(f"{key}: the patch removes it, but lines are left in it")
        self.afters[key] = (None if patch.target is None else changed, mode if patch.mode is None else patch.mode)

    def _move(self, patch: FilePatch) -> None:
        """A rename or a copy: of what the file was before the diff."""
        source, target = self._key(patch.source or patch.name), self._key(patch.name)
        before = self.befores[source]
        if before.data is None:
            raise FileNotFoundError(errno.ENOENT, f"the patch moves {source}, which is not there", source)
        if target in self._made or (self.befores[target].data is not None and target not in self._leaving):
            raise FileExistsError(errno.EEXIST, f"the patch moves {source} to {target}, which is there", target)
        changed = apply(patch, before.data, self._effort)
        if patch.kind == "rename" and source not in self._made:
            self.afters[source] = (None, before.mode)
        self.afters[target] = (changed, before.mode if patch.mode is None else patch.mode)
        self._made.add(target)
