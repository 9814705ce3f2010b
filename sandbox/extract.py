"""Lays a layer's entries out as a directory that overlayfs can stack; hostile ones are refused before they act."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from sandbox.errors import LayerError
from sandbox.tarstream import MTIME, Entry
from sandbox.uppertree import MAX_DEPTH, OPAQUE, OPAQUE_XATTR, WHITEOUT

_COPY_BYTES = 1024 * 1024
_TIMES = (MTIME, MTIME)
_BLOCK = 64 * 1024
_ZEROS = bytes(_BLOCK)


class Extraction:
    """Entries into one new directory that nobody else can see yet.

    An entry's directory must have come before it as a directory, so nothing is ever written through a link; what is
    there is never overwritten.

    Args:
        target: an empty directory of mode 700.
        max_entries: names above which the layer is refused.
    """

    def __init__(self, target: Path, max_entries: int) -> None:
        self._target = os.fsencode(target)
        self._left = self._max = max_entries
        self._directories: dict[bytes, int] = {b"": 0o755}
        self._files: set[bytes] = set()

    def add(self, entry: Entry, take: Callable[[int], bytes]) -> None:
        """Write one entry.

        Raises:
            LayerError: it may not be in a layer.
        """
        self._left -= 1
        if self._left < 0:
            raise LayerError(f"the layer has more than {self._max} entries", boundary="layers")
        parent, name = self._checked(entry)
        path = self._target + b"/" + entry.path
        try:
            if entry.kind == "directory":
                os.mkdir(path, 0o700)  # noqa: PTH102 - bytes
                self._directories[entry.path] = entry.mode
            elif entry.kind == "symlink":
                os.symlink(entry.target, path)  # noqa: PTH211 - bytes
                os.utime(path, _TIMES, follow_symlinks=False)
            elif entry.kind == "hardlink":
                self._link(entry, path)
            elif name == OPAQUE:
                os.setxattr(self._target + b"/" + parent, OPAQUE_XATTR, b"y", os.XATTR_CREATE)
            elif name.startswith(WHITEOUT):
                hidden = os.path.join(self._target, parent, name[len(WHITEOUT) :])  # noqa: PTH118 - bytes
                os.mknod(hidden, stat.S_IFCHR, 0)
            else:
                self._file(entry, path, take)
        except OSError as error:
            raise LayerError(f"{entry.path!r} cannot be unpacked: {error.strerror}", boundary="layers") from error

    def finish(self) -> None:
        """Give the directories their modes and times, deepest first."""
        for path, mode in sorted(self._directories.items(), reverse=True):
            whole = self._target + b"/" + path
            os.chmod(whole, mode)  # noqa: PTH101 - bytes
            with suppress(PermissionError):  # a directory of mode 000 keeps its time, which no digest holds
                os.utime(whole, _TIMES)

    def _checked(self, entry: Entry) -> tuple[bytes, bytes]:
        parts = entry.path.split(b"/")
        if not entry.path or any(part in (b"", b".", b"..") or b"\0" in part for part in parts):
            raise LayerError(f"{entry.path!r} is no path inside a layer", boundary="layers")
        if b"\0" in entry.target:
            raise LayerError(f"{entry.path!r} leads to {entry.target!r}, which is no path", boundary="layers")
        if len(parts) > MAX_DEPTH + 1:
            raise LayerError(f"directories are nested deeper than {MAX_DEPTH}", boundary="layers")
        if entry.mode & ~0o1777:
            raise LayerError(
                f"{entry.path!r} has mode {entry.mode:o}; setuid and setgid are refused", boundary="layers"
            )
        parent, name = b"/".join(parts[:-1]), parts[-1]
        if parent not in self._directories:
            raise LayerError(f"{entry.path!r} comes without its directory", boundary="layers")
        marks = name.startswith(WHITEOUT)
        if marks and (entry.kind != "file" or entry.size or name in (WHITEOUT, WHITEOUT + b".", WHITEOUT + b"..")):
            raise LayerError(f"{entry.path!r} is no whiteout", boundary="layers")
        if marks and name != OPAQUE and name.startswith(WHITEOUT * 2):
            raise LayerError(f"{entry.path!r} is an unknown mark", boundary="layers")
        return parent, name

    def _link(self, entry: Entry, path: bytes) -> None:
        if entry.target not in self._files:
            raise LayerError(f"{entry.path!r} links to {entry.target!r}, which is no file before it", boundary="layers")
        os.link(self._target + b"/" + entry.target, path, follow_symlinks=False)

    def _file(self, entry: Entry, path: bytes, take: Callable[[int], bytes]) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            while chunk := take(_COPY_BYTES):
                _write(file, chunk)
            file.flush()
            os.ftruncate(fd, entry.size)
            os.fchmod(fd, entry.mode)
            os.utime(fd, _TIMES)
        self._files.add(entry.path)


def _write(file: BinaryIO, chunk: bytes) -> None:
    """Write on; blocks of zeros become a hole, so that neither sparse files nor bombs of zeros cost any disk."""
    for start in range(0, len(chunk), _BLOCK):
        block = chunk[start : start + _BLOCK]
        if block == _ZEROS:
            file.seek(_BLOCK, os.SEEK_CUR)
        else:
            file.write(block)
