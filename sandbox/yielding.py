"""What has computed in a sandbox for a while yields the CPUs to whatever only answers: workers, shells, engines.

A worker's event loop waits for milliseconds behind every process of its agents that spins, because a fair scheduler
gives each its share. Nobody without privileges may raise a priority, but anyone may lower it: what computes for seconds
is niced. That is a session on kernels that share CPUs out by session first (autogroup): it is taken back when the
session rests. And it is a process, which keeps its niceness, so never one that lives on to answer: not the first of a
session, nor the shell that a launcher started. Where the CPUs are free none of this slows anything down.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sandbox.usage import Process

NICE = 10
"""A tenth of the share of a process that is not niced: enough that it waits for them, too little to starve it."""
BUSY, RESTING = 0.5, 0.1
"""Parts of the time, or of one CPU: above the first a process or session yields, below the second it rests."""
AFTER_S = 2.0
"""What ends sooner, or answers in between, is left alone."""
JUDGED_S = 1.0
"""Who gets little of a full CPU is looked at this long: shorter, it may not have run at all."""
BURST_NS = 1_000_000
"""Who computes goes on until its slice ends, some milliseconds; who answers waits again after a fraction of that."""


class _Ran(NamedTuple):
    """Until a moment: nanoseconds that a process has run and waited for a CPU, and how many times it ran."""

    at: float
    ran: int
    waited: int
    times: int


class Yielding:
    """Belongs to one watchdog, which calls it at each of its looks.

    Args:
        after_s: for how long something has to compute before it yields.
    """

    def __init__(self, after_s: float = AFTER_S) -> None:
        self._after_s, self._looked_at = after_s, time.monotonic()
        self._own: dict[int, float] = {}
        self._used: dict[int, float] = {}
        self._ran: dict[int, _Ran] = {}
        self._since: dict[int, float] = {}  # what computes
        self._niced: set[int] = set()
        self._yielding: set[int] = set()  # first processes of sessions that do

    def look(self, families: Mapping[int, Sequence[int]], table: Mapping[int, Process]) -> None:
        """Nice what has computed for long.

        Args:
            families: first process of a session -> it and all its descendants.
            table: what each of them has used.
        """
        now = time.monotonic()
        passed_s, self._looked_at = max(now - self._looked_at, 1e-3), now
        own = {pid: table[pid].own_s for members in families.values() for pid in members}
        used = {root: sum(table[pid].cpu_s for pid in members) for root, members in families.items()}
        spent = {pid: own_s - self._own.get(pid, 0.0) for pid, own_s in own.items()}
        computing = {pid for pid in own if self._computes(pid, spent[pid], passed_s, now)}
        for root, members in families.items():
            share = (used[root] - self._used.get(root, 0.0)) / passed_s
            if share > BUSY or not computing.isdisjoint(members):
                computing.add(root)
            if root in self._yielding and root not in computing and share < RESTING and _nice_session(root, 0):
                self._yielding.discard(root)
        self._since = {pid: self._since.get(pid, now - passed_s) for pid in computing}
        for pid, since in self._since.items():
            if now - since < self._after_s:
                continue
            if pid in families:
                if pid not in self._yielding and _nice_session(pid, NICE):
                    self._yielding.add(pid)
            elif pid not in self._niced and _nice(pid, table[pid].parent, families.keys()):
                self._niced.add(pid)
        self._own, self._used = own, used
        self._niced &= own.keys()
        self._yielding &= used.keys()
        self._ran = {pid: ran for pid, ran in self._ran.items() if pid in own}

    def _computes(self, pid: int, spent_s: float, passed_s: float, now: float) -> bool:
        """Whether a process has used most of a CPU, or waited for one whenever it did not compute."""
        if spent_s > BUSY * passed_s:
            return True
        if spent_s <= 0 and pid not in self._ran:
            return False
        then = self._ran.get(pid)
        if then is not None and now - then.at < JUDGED_S:
            return pid in self._since
        found = _schedule(pid, now)
        if found is None or (then is not None and found.times == then.times):
            self._ran.pop(pid, None)
            return False
        self._ran[pid] = found
        if then is None:
            return False
        ran, wanted = found.ran - then.ran, found.ran - then.ran + found.waited - then.waited
        return wanted > BUSY * 1e9 * (now - then.at) and ran > BURST_NS * (found.times - then.times)


def _schedule(pid: int, now: float) -> _Ran | None:
    """None where nobody tells."""
    with contextlib.suppress(OSError, ValueError):
        ran, waited, times = map(int, Path(f"/proc/{pid}/schedstat").read_bytes().split())
        return _Ran(now, ran, waited, times)
    return None


def _nice(pid: int, parent: int, known: Collection[int]) -> bool:
    """Nice a process with all its threads, and its session where that is not a known one; whether it was done."""
    with contextlib.suppress(OSError):
        if os.getpgid(parent) in known:  # a launcher started it: it is the sandbox's shell
            return True
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - as everywhere in /proc
            os.setpriority(os.PRIO_PROCESS, int(thread), NICE)
        return os.getsid(pid) in known or _nice_session(pid, NICE)
    return True  # it is gone


def _nice_session(pid: int, nice: int) -> bool:
    """Give a process's session a niceness; False where the kernel wants to be asked again later."""
    try:
        Path(f"/proc/{pid}/autogroup").write_text(f"{nice}\n")
    except BlockingIOError:
        return False
    except OSError:  # it is gone, or the kernel has no such groups
        return True
    return True
