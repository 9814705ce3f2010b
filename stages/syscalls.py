"""The system calls that stages/sharedfs.py makes, one method each: what a test subclasses to inject faults.

A subclass may fail, shorten, delay, count or kill at any of them; the rest stays real.
"""

# ruff: noqa: D102, PTH102, PTH104, PTH108, PTH116, PTH208 - each method is the system call of its name, and calls it by that name

from __future__ import annotations

import mmap
import os


class FileSystem:
    """The operating system's own calls; paths are text, files are descriptors."""

    def open(self, path: str, flags: int, mode: int) -> int:
        return os.open(path, flags, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return os.write(fd, data)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        return os.pread(fd, length, offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def mmap(self, fd: int, length: int) -> mmap.mmap:
        return mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ)

    def rename(self, src: str, dst: str) -> None:
        os.rename(src, dst)

    def link(self, src: str, dst: str) -> None:
        os.link(src, dst)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)
