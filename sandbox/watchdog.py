"""The watchdog of a worker: one task looks at what all its sandboxes use, and ends those that use too much.

It is what holds limits where no control group is delegated to users, as on almost any cluster. It looks often enough
that what a sandbox takes between two looks is bounded, and rarely takes more than a small part of a core: after a look
that cost t seconds of CPU there is none for 20 t, or for two seconds. The kernel's resource limits hold each process
in between. Files are looked at only when the node's disk or shared memory has grown by a part of what was left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from sandbox.errors import LimitExceeded
from sandbox.limits import MIB, Bounds, Excess, Usage, excess
from sandbox.usage import (
    Process,
    families,
    memory_device,
    processes,
    removed_but_open,
    shared_memory_bytes,
    shared_once,
    written,
)  # fmt: skip
from sandbox.yielding import Yielding

log = logging.getLogger(__name__)

PACE_S: Final = 0.25
DISK_PACE_S: Final = 1.0
BACKSTOP_S: Final = 30.0
"""The longest time between two looks at a disk on which nothing seems to have grown."""
_SHARE: Final = 20
_LONGEST_PAUSE_S: Final = 2.0
_MOST: Final = 1 << 62
_WORDS: Final = {
    "cpu_s": "CPU seconds", "memory_mib": "MiB of memory", "processes": "processes and threads",
    "disk_mib": "MiB on disk", "files": "files", "wall_s": "seconds of wall time",
}  # fmt: skip


class Watched(Protocol):
    """A sandbox as its watchdog sees it."""

    @property
    def roots(self) -> Collection[int]:
        """Process ids whose descendants, and they themselves, are the sandbox."""
        ...

    @property
    def directory(self) -> Path:
        """What it writes to lies below."""
        ...

    @property
    def given(self) -> tuple[int, int]:
        """Bytes and names below that were there before it began."""
        ...

    @property
    def bounds(self) -> Bounds:
        """What it may use."""
        ...

    def end(self, reason: LimitExceeded) -> None:
        """End it now; every later use of it raises `reason`."""
        ...


class Used(NamedTuple):
    """What is in use on this node, by whomever: growth tells when a closer look is worth its price."""

    disk_bytes: int
    files: int
    shared_memory_bytes: int


_NOTHING: Final = Used(0, 0, 0)


@dataclass
class _Seen:
    """What is remembered of one sandbox."""

    since: float
    gone_cpu_s: float = 0.0
    cpu_s_of: dict[int, float] = field(default_factory=dict)
    disk_bytes: int = 0
    files: int = 0
    unnamed_bytes: int = 0
    looked_at: float = -BACKSTOP_S
    not_before: float = 0.0
    used_then: Used = _NOTHING

    def cpu_s(self, now: Mapping[int, float]) -> float:
        """CPU seconds since its start, from those of its families now; a family that has gone keeps what it had."""
        for root in self.cpu_s_of.keys() - now.keys():
            self.gone_cpu_s += self.cpu_s_of.pop(root)
        for root, cpu_s in now.items():
            self.cpu_s_of[root] = max(self.cpu_s_of.get(root, 0.0), cpu_s)
        return self.gone_cpu_s + sum(self.cpu_s_of.values())


class Watchdog:
    """Looks after the sandboxes that `those` gives, from the first `ensure` until `close`.

    Args:
        scratch: the filesystem that they write to.
        those: the sandboxes that are there now.
        pace_s: shortest time between two looks.
    """

    def __init__(self, scratch: Path, those: Callable[[], Collection[Watched]], pace_s: float = PACE_S) -> None:
        self._scratch, self._those, self._pace_s = scratch, those, pace_s
        self._seen: dict[Watched, _Seen] = {}
        self._task: asyncio.Task[None] | None = None
        self._memory_device = memory_device()
        self._yielding = Yielding()
        self._used_last, self._there_last = _NOTHING, frozenset[Watched]()  # at the last look
        self._thread: ThreadPoolExecutor | None = None

    def ensure(self) -> None:
        """Begin, where that has not been done."""
        if self._task is None or self._task.done():
            # of its own: those of the loop may all be busy with unpacking just when the node is full
            self._thread = self._thread or ThreadPoolExecutor(1, "watchdog")
            self._task = asyncio.create_task(self._watch(), name="sandbox watchdog")

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    async def _watch(self) -> None:
        while True:
            cost_s = 0.0
            try:
                cost_s = await self._look_once()
            except Exception:  # whatever broke one look, without the next ones no sandbox has a limit
                log.exception("a look at the sandboxes failed; the next one follows")
            await asyncio.sleep(max(self._pace_s, min(_LONGEST_PAUSE_S, _SHARE * cost_s)))

    async def _look_once(self) -> float:
        """End whoever passed a bound; the CPU seconds that the look cost."""
        those = self._those()
        for gone in self._seen.keys() - set(those):  # one whose shell has just ended is remembered: another follows
            del self._seen[gone]
        roots = {one: tuple(one.roots) for one in those if one.roots and one.bounds.watched}
        now = time.monotonic()
        for one in roots.keys() - self._seen.keys():  # who was not there at the last look has written nothing before it
            new = one not in self._there_last
            self._seen[one] = _Seen(now, looked_at=now, used_then=self._used_last) if new else _Seen(now)
        self._there_last = frozenset(those)
        if not roots:
            return 0.0
        found, cost_s = await asyncio.get_running_loop().run_in_executor(self._thread, self._look, roots)
        for one, passed in found.items():
            if one in self._those():
                one.end(_reason(passed))
        return cost_s

    def _look(self, roots: dict[Watched, tuple[int, ...]]) -> tuple[dict[Watched, Excess], float]:
        """One look at all of them, in a thread: who passed a bound, and the CPU seconds that it cost."""
        started = time.thread_time()
        table = processes()
        family = families(table, {pid for pids in roots.values() for pid in pids})
        self._yielding.look(family, table)
        used = self._used_last = self._used()
        found = {}
        for one, pids in roots.items():
            try:
                passed = self._passed(one, {root: family[root] for root in pids}, table, used)
            except OSError as error:  # it went away while it was looked at, or there are no descriptors left
                log.debug("a sandbox could not be looked at: %s", error)
                continue
            if passed is not None:
                found[one] = passed
        return found, time.thread_time() - started

    def _passed(
        self, one: Watched, family: dict[int, list[int]], table: dict[int, Process], used: Used
    ) -> Excess | None:
        seen, bounds = self._seen[one], one.bounds
        now = time.monotonic()
        members = [pid for pids in family.values() for pid in pids]
        mine = [table[pid] for pid in members]
        cpu_s = seen.cpu_s({root: sum(table[pid].cpu_s for pid in pids) for root, pids in family.items() if pids})
        memory = sum(process.resident_bytes for process in mine)
        if self._is_due(seen, bounds, used, now):
            self._look_closely(one, seen, members, used)
        memory += seen.unnamed_bytes
        if bounds.memory_mib is not None and memory > bounds.memory_mib * MIB:
            memory += shared_once(members, table) - sum(process.resident_bytes for process in mine)
        usage = Usage(
            cpu_s=cpu_s, memory_bytes=memory, processes=sum(process.threads for process in mine),
            disk_bytes=seen.disk_bytes, files=seen.files, wall_s=now - seen.since,
        )  # fmt: skip
        return excess(bounds, usage)

    def _is_due(self, seen: _Seen, bounds: Bounds, used: Used, now: float) -> bool:
        """Nobody can have passed a bound before the filesystem has grown by what was left to it, but for removals."""
        if now < seen.not_before or (bounds.disk_mib, bounds.files, bounds.memory_mib) == (None, None, None):
            return False
        left = Used(
            _MOST if bounds.disk_mib is None else bounds.disk_mib * MIB - seen.disk_bytes,
            _MOST if bounds.files is None else bounds.files - seen.files,
            _MOST if bounds.memory_mib is None else bounds.memory_mib * MIB - seen.unnamed_bytes,
        )
        grown = any(4 * (new - old) >= rest for new, old, rest in zip(used, seen.used_then, left, strict=True))
        return grown or now - seen.looked_at >= BACKSTOP_S

    def _look_closely(self, one: Watched, seen: _Seen, members: list[int], used: Used) -> None:
        """At files: what has a name, and what is open without one."""
        bounds, started = one.bounds, time.thread_time()
        given_bytes, given_names = one.given
        size, names = written(
            one.directory,
            _MOST if bounds.disk_mib is None else given_bytes + bounds.disk_mib * MIB,
            _MOST if bounds.files is None else given_names + bounds.files,
        )
        size, names = max(0, size - given_bytes), max(0, names - given_names)
        held, seen.unnamed_bytes = removed_but_open(members, self._memory_device)
        seen.disk_bytes, seen.files, seen.used_then, seen.looked_at = size + held, names, used, time.monotonic()
        seen.not_before = time.monotonic() + max(DISK_PACE_S, _SHARE * (time.thread_time() - started))

    def _used(self) -> Used:
        found = os.statvfs(self._scratch)
        return Used(
            (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_files - found.f_ffree, shared_memory_bytes()
        )


def _reason(passed: Excess) -> LimitExceeded:
    return LimitExceeded(
        f"the sandbox was ended: it used {passed.measured:g} {_WORDS[passed.limit]}, and sandbox.limits.{passed.limit} "
        f"allows {passed.allowed:g}",
        limit=passed.limit, measured=passed.measured, allowed=passed.allowed,
    )  # fmt: skip
