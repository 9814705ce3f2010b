"""File systems that misbehave on purpose: what `sharedfs.use` is given in tests."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from stages.syscalls import FileSystem


class FaultyFileSystem(FileSystem):
    """The real one, with chosen calls failing.

    Args:
        fails: called with the name of each call and its path or descriptor; returns an errno to fail with, or 0.
        short: when true, a failing write writes half of its bytes and reports them.
    """

    def __init__(self, fails: Callable[[str, object], int], *, short: bool = False) -> None:
        self._fails, self._short = fails, short
        self.calls: list[str] = []

    def _maybe(self, call: str, subject: object) -> int:
        self.calls.append(call)
        return self._fails(call, subject)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        code = self._maybe("write", fd)
        if code and self._short:
            return os.write(fd, memoryview(data)[: len(data) // 2])
        if code:
            raise OSError(code, os.strerror(code))
        return super().write(fd, data)

    def fsync(self, fd: int) -> None:
        if code := self._maybe("fsync", fd):
            raise OSError(code, os.strerror(code))
        super().fsync(fd)

    def open(self, path: str, flags: int, mode: int) -> int:
        if code := self._maybe("open", path):
            raise OSError(code, os.strerror(code), path)
        return super().open(path, flags, mode)


def failing(call: str, times: range, code: int = errno.ENOSPC) -> Callable[[str, object], int]:
    """Fail the n-th calls of a kind, n in `times`, counted from 0."""
    seen = 0

    def fails(name: str, subject: object) -> int:
        nonlocal seen
        if name != call:
            return 0
        seen += 1
        return code if seen - 1 in times else 0

    return fails
