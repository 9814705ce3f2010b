"""What files were like before edits, for undoing them: within bounds, in memory, gone with the sandbox. Pure."""

from __future__ import annotations

import posixpath
from collections import deque
from dataclasses import dataclass

KEPT_EDITS, KEPT_BYTES = 64, 32 * 1024 * 1024
"""Of one sandbox; the oldest go first."""


@dataclass(frozen=True)
class Before:
    """A file before an edit.

    Args:
        path: of the file itself, behind all links.
        data: None where it was not there.
        mode: its permission bits.
    """

    path: str
    data: bytes | None
    mode: int


class History:
    """The edits of one sandbox, in their order."""

    def __init__(self) -> None:
        self._edits: deque[tuple[str, Before]] = deque()
        self._bytes = 0

    def add(self, path: str, before: Before) -> None:
        """An edit was made through `path`."""
        self._edits.append((_name(path), before))
        self._bytes += len(before.data or b"")
        while len(self._edits) > KEPT_EDITS or self._bytes > KEPT_BYTES:
            _, oldest = self._edits.popleft()
            self._bytes -= len(oldest.data or b"")

    def last(self, path: str) -> Before | None:
        """The file before its last edit that was not undone; None where none is known."""
        at = self._last(path)
        return None if at is None else self._edits[at][1]

    def forget(self, path: str) -> None:
        """Its last edit was undone."""
        at = self._last(path)
        if at is not None:
            self._bytes -= len(self._edits[at][1].data or b"")
            del self._edits[at]

    def _last(self, path: str) -> int | None:
        """Where its last edit is."""
        name = _name(path)
        return next((at for at in range(len(self._edits) - 1, -1, -1) if self._edits[at][0] == name), None)


def _name(path: str) -> str:
    """One spelling for all that a path may have."""
    return posixpath.normpath(f"/{path.lstrip('/')}")
