"""File systems that misbehave on purpose: what `sharedfs.use` is given in tests."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from stages.syscalls import FileSystem


@dataclass
class Rule:
    """Calls of `op` on paths that contain `match`: the first `skip` pass, the next `times` get `act`."""

    op: str
    act: Callable[[], None]
    match: str
    skip: int
    times: int


@dataclass
class FaultyFs(FileSystem):
    """The real filesystem with rules. `counts` and `log` have the calls by name.

    `gate` holds back every fsync while it is cleared, and `waiting` says that one is held.
    """

    rules: list[Rule] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    gate: threading.Event = field(default_factory=threading.Event)
    waiting: threading.Event = field(default_factory=threading.Event)
    log: list[tuple[str, str]] = field(default_factory=list)
    short: bool = False

    def __post_init__(self) -> None:
        self._names: dict[int, str] = {}
        self.gate.set()

    def fail(self, op: str, errno_: int, match: str = "", skip: int = 0, times: int = 1) -> None:
        def act() -> None:
            raise OSError(errno_, os.strerror(errno_), match or None)

        self.rules.append(Rule(op, act, match, skip, times))

    def shorten(self, match: str = "", skip: int = 0, times: int = 1) -> None:
        """Let writes take only half of their bytes."""

        def act() -> None:
            self.short = True

        self.rules.append(Rule("write", act, match, skip, times))

    def _hit(self, op: str, path: str) -> None:
        self.counts[op] += 1
        self.log.append((op, path.rpartition("/")[2]))
        for rule in self.rules:
            if rule.op != op or rule.match not in path or rule.times == 0:
                continue
            if rule.skip > 0:
                rule.skip -= 1
                continue
            rule.times -= 1
            rule.act()

    def open(self, path: str, flags: int, mode: int) -> int:
        self._hit("open", path)
        fd = super().open(path, flags, mode)
        self._names[fd] = path
        return fd

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self._hit("write", self._names.get(fd, ""))
        if self.short:
            self.short = False
            data = memoryview(data)[: len(data) // 2]
        return super().write(fd, data)

    def fsync(self, fd: int) -> None:
        self._hit("fsync", self._names.get(fd, ""))
        if not self.gate.is_set():
            self.waiting.set()
            if not self.gate.wait(30):
                raise TimeoutError("nobody opened the gate")
        super().fsync(fd)

    def rename(self, src: str, dst: str) -> None:
        self._hit("rename", dst)
        super().rename(src, dst)

    def link(self, src: str, dst: str) -> None:
        super().link(src, dst)
        self._hit("link", dst)

    def unlink(self, path: str) -> None:
        self._hit("unlink", path)
        super().unlink(path)
