"""The store's part of stages/sharedfs.py: large files read in order, locks for courtesy, and times of last use."""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from stages.sharedfs import FILE_MODE, system

if TYPE_CHECKING:
    from typing_extensions import Buffer

_READ_AHEAD = 4 << 20


class _Reader(io.RawIOBase):
    """A file read from its start to its end."""

    def __init__(self, fd: int) -> None:
        self._fd, self._offset = fd, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        data = system().pread(self._fd, view.nbytes, self._offset)
        view[: len(data)] = data
        self._offset += len(data)
        return len(data)


@contextmanager
def reader(path: Path) -> Iterator[BinaryIO]:
    """A large file as a stream, read once and in order, in requests large enough for a parallel filesystem."""
    fd = system().open(str(path), os.O_RDONLY | os.O_CLOEXEC, FILE_MODE)
    try:
        yield io.BufferedReader(_Reader(fd), _READ_AHEAD)
    finally:
        system().close(fd)


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the file's lock until it is closed, or None while another process has it.

    For courtesy among nodes only: where the filesystem has no locks across nodes, everybody gets it.
    """
    fd = system().open(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            system().close(fd)
            return None
    return fd


def last_change(path: Path) -> tuple[float, int] | None:
    """Time of the last change (seconds since 1970, by the filesystem's clock) and size in bytes; None where nothing."""
    try:
        found = system().stat(str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_mtime, found.st_size


def touch(path: Path) -> None:
    """Let the file's time of change be now, for whoever removes what was not used for long; no error where it fails."""
    with suppress(OSError):
        os.utime(path)
