"""Editing texts as agents do: lines shown by their numbers, one place replaced, lines put in. Pure."""

from __future__ import annotations

from sandbox.errors import FilesError

SHOWN_CHARACTERS = 64 * 1024
"""Of one view, at most."""


def numbered(data: bytes, first: int, last: int | None) -> str:
    """Lines `first` to `last` of a text, each behind its number and a tab; the first line is 1.

    Raises:
        ValueError: there is no such range; the message says how many lines there are.
    """
    lines = data.decode("utf-8", "replace").split("\n")
    if lines[-1] == "" and len(lines) > 1:
        lines.pop()
    end = len(lines) if last is None or last == -1 else last
    if not 1 <= first <= len(lines) or end < first:
        raise ValueError(f"lines {first} to {end} are not in it: it has {len(lines)} lines")
    shown: list[str] = []
    size = 0
    for number in range(first, min(end, len(lines)) + 1):
        line = f"{number:6}\t{lines[number - 1]}"[:SHOWN_CHARACTERS]
        size += len(line) + 1
        if shown and size > SHOWN_CHARACTERS:
            shown.append(f"[cut before line {number} of {len(lines)}: view a smaller range]")
            break
        shown.append(line)
    return "\n".join(shown)


def replaced(path: str, data: bytes, old: bytes, new: bytes) -> bytes:
    """The data with its one occurrence of `old` replaced.

    Raises:
        FilesError: there are none or several; the message counts them, and says in which lines they are.
    """
    count = data.count(old) if old else 0
    if count != 1:
        lines = [data.count(b"\n", 0, at) + 1 for at in _places(data, old)]
        where = f" (lines {', '.join(map(str, lines))})" if lines else ""
        raise FilesError(
            f"the text to replace occurs {count} times in {path!r}{where}; it must occur once: "
            + ("give more of its surroundings" if count else "view the file, and give its text exactly"),
            boundary="files",
            path=path,
            count=count,
        )
    return data.replace(old, new)


def _places(data: bytes, sought: bytes) -> list[int]:
    """Where it begins, the first ten times."""
    found: list[int] = []
    at = data.find(sought) if sought else -1
    while at >= 0 and len(found) < 10:
        found.append(at)
        at = data.find(sought, at + len(sought))
    return found


def inserted(data: bytes, line: int, text: bytes) -> bytes:
    """The data with lines put in after line `line`; 0 is before the first.

    Raises:
        ValueError: there is no such line.
    """
    lines = data.split(b"\n")
    count = len(lines) - (not lines[-1])
    if not 0 <= line <= count:
        raise ValueError(f"there is no line {line}: it has {count} lines")
    before = b"\n".join(lines[:line]) + b"\n" if line else b""
    after = b"\n".join(lines[line:])
    if not text.endswith(b"\n") and (after or data.endswith(b"\n")):
        text += b"\n"
    return before + text + after
