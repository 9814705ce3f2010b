"""What a directory was like before an agent had it: by that, what changed since is told without a second copy of it.

A change of a file's content, mode, links or name gives its inode a new time of change, which only the kernel's clock
sets: what has the inode that it had at this path, and a time of change before the agent came, is as it was.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sandbox.uppertree import opened

_MARK = b".pristine-mark"


class Pristine:
    """The names and inodes below a directory at the time of its making; some 200 bytes a name.

    Args:
        root: a directory of ours; nobody else changes it yet. Blocks.
    """

    def __init__(self, root: Path) -> None:
        self._inodes: dict[bytes, int] = {}
        self._names: dict[bytes, frozenset[bytes]] = {}
        self._latest = 0
        with opened(root, directory=True) as source:
            self._read(source, b"")
            self._before = self._next_tick(source)
            self._inodes[b""] = os.fstat(source).st_ino

    def names(self, path: bytes) -> frozenset[bytes]:
        """What a directory held; `path` is relative to the root, and begins with a slash or is empty."""
        return self._names.get(path, frozenset())

    def has(self, path: bytes, status: os.stat_result) -> bool:
        """Whether what is at a path now is what was there, unchanged; a directory's entries are not looked at."""
        return self._inodes.get(path) == status.st_ino and status.st_ctime_ns < self._before

    def _read(self, source: int, path: bytes) -> None:
        names = frozenset(map(os.fsencode, os.listdir(source)))
        self._names[path] = names
        for name in names:
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            self._inodes[there := path + b"/" + name] = status.st_ino
            if stat.S_ISDIR(status.st_mode):
                with opened(name, within=source, directory=True, status=status) as inner:
                    self._read(inner, there)
                status = os.stat(name, dir_fd=source, follow_symlinks=False)  # its mode may have been lent
            self._latest = max(self._latest, status.st_ctime_ns)

    def _next_tick(self, source: int) -> int:
        """A time of change later than all that were read: the kernel's clock for them has ticks of milliseconds."""
        os.close(os.open(_MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=source))
        try:
            while True:
                os.utime(_MARK, dir_fd=source)
                found = os.stat(_MARK, dir_fd=source).st_ctime_ns
                if found > self._latest:
                    return found
        finally:
            os.unlink(_MARK, dir_fd=source)
