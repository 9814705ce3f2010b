"""A process that is killed at the n-th call of a kind that it makes to the file system, and a router to do it to."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from stages import sharedfs
from stages.errors import StageError
from stages.layout import RunLayout
from stages.router.served import ServedTask
from stages.router.service import serve
from stages.syscalls import FileSystem
from tests.support.routers import ToyTask, options
from tests.unit.stages_files import killed_writer

REFUSED = 3
"""Exit code of a router that found another in its place."""


@dataclass(frozen=True)
class Crash:
    """Die at the n-th (from 0) call of a kind whose path holds `match`; a write is cut in half first."""

    call: str
    n: int
    match: str = ""


class CrashingFileSystem(FileSystem):
    """The real one, until the moment. Counts are kept over all threads; only calls that change something count."""

    def __init__(self, crash: Crash | None) -> None:
        self._crash, self._lock, self._names = crash, threading.Lock(), dict[int, str]()
        self.counts: Counter[str] = Counter()

    def _reached(self, call: str, path: str) -> bool:
        if self._crash is not None and self._crash.match not in path:
            return False
        with self._lock:
            self.counts[call] += 1
            return self._crash is not None and (call, self.counts[call] - 1) == (self._crash.call, self._crash.n)

    def _pass(self, call: str, path: str) -> None:
        if self._reached(call, path):
            _die()

    def open(self, path: str, flags: int, mode: int) -> int:
        if flags & os.O_CREAT:
            self._pass("open", path)
        fd = super().open(path, flags, mode)
        self._names[fd] = path
        return fd

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self._reached("write", self._names.get(fd, "")):
            os.write(fd, memoryview(data)[: len(data) // 2])
            _die()
        return super().write(fd, data)

    def fsync(self, fd: int) -> None:
        self._pass("fsync", self._names.get(fd, ""))
        super().fsync(fd)

    def rename(self, src: str, dst: str) -> None:
        self._pass("rename", dst)
        super().rename(src, dst)

    def link(self, src: str, dst: str) -> None:
        self._pass("link", dst)
        super().link(src, dst)

    def unlink(self, path: str) -> None:
        self._pass("unlink", path)
        super().unlink(path)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def route_until_killed(root: Path, crash: Crash | None, changes: dict[str, object]) -> None:
    """A router of the toy task in this process: until its crash, SIGTERM, or another router."""
    with sharedfs.use(CrashingFileSystem(crash)):
        try:
            asyncio.run(_route(RunLayout(root), changes))
        except* StageError:
            os._exit(REFUSED)


def write_until_killed(root: Path, life: int, tell: Connection, crash: Crash) -> None:
    """RUN's segments and EVAL's shards, many slots at once, until the crash; tells each range that is durable."""
    with sharedfs.use(CrashingFileSystem(crash)):
        killed_writer.write_until_killed(root, life, tell)


async def _route(layout: RunLayout, changes: dict[str, object]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    member = f"router-1-{os.getpid()}"
    served = ServedTask(ToyTask(), lambda image: "sha256:0", privileged_agent=False)
    await serve(layout, served, options(member=member, **changes), stop)
