"""A file system that looks through a stale cache: what other nodes see of Lustre and NFS for a while."""

from __future__ import annotations

import errno
import os
import random
import threading

from stages.syscalls import FileSystem


class StaleFileSystem(FileSystem):
    """Each name's first looks show it as it was: not there, stale, or cut short; how, is drawn by seed and name.

    As names draw by themselves, two files are seen in another order than the one in which they were written.

    Args:
        seed: of the draws.
        looks: the most looks at one name that show something old.
        match: only names that hold this.
    """

    def __init__(self, seed: int, looks: int = 6, match: str = "") -> None:
        self._seed, self._looks, self._match = seed, looks, match
        self._lock = threading.Lock()
        self._old: dict[str, list[str]] = {}
        self._cut: dict[int, int] = {}
        self.shown: list[str] = []

    def _look(self, path: str, *, at_name: bool = False) -> str:
        """What this look shows: "absent", "stale", "short" or "now"."""
        if self._match not in path:
            return "now"
        with self._lock:
            if path not in self._old:
                draw = random.Random(f"{self._seed}-{path.rpartition('/')[2]}")
                kinds = ["absent"] * draw.randint(0, self._looks)
                # A name that has been seen stays; its size and its inode may still be old.
                self._old[path] = kinds + draw.choices(["stale", "short"], k=draw.randint(0, self._looks))
            old = self._old[path]
            if not old or (at_name and old[0] == "short"):
                return "now"
            self.shown.append(old[0])
            return old.pop(0)

    def open(self, path: str, flags: int, mode: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY):
            return super().open(path, flags, mode)
        look = self._look(path)
        self._refuse(look, path)
        fd = super().open(path, flags, mode)
        self._cut.pop(fd, None)
        if look == "short":
            self._cut[fd] = os.fstat(fd).st_size * 2 // 3
        return fd

    @staticmethod
    def _refuse(look: str, path: str) -> None:
        code = {"absent": errno.ENOENT, "stale": errno.ESTALE}.get(look, 0)
        if code:
            raise OSError(code, os.strerror(code), path)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        cut = self._cut.get(fd)
        return super().pread(fd, length if cut is None else max(0, min(length, cut - offset)), offset)

    def fstat(self, fd: int) -> os.stat_result:
        found = super().fstat(fd)
        if fd not in self._cut:
            return found
        fields = list(found)
        fields[6] = self._cut[fd]
        return os.stat_result(fields)

    def stat(self, path: str) -> os.stat_result:
        self._refuse(self._look(path, at_name=True), path)
        return super().stat(path)

    def listdir(self, path: str) -> list[str]:
        self._refuse(self._look(path), path)
        names = super().listdir(path)
        return names[: len(names) // 2] if self._look(f"{path}/.") != "now" else names
