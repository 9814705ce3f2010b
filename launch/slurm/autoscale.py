"""When the RUN pool grows and shrinks with its queue: a pure controller of what a status document says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from conf.schema import Autoscale

_MEMBER: Final = re.compile(r"run-(\d+)-")
SETTLE_S: Final = 30.0
"""Between two changes: what was submitted has to start, and what was drained to hand over, before it counts."""


@dataclass(frozen=True)
class Added:
    """Workers that were added by one submission: numbers `first` to `first + workers - 1`."""

    job_id: str
    first: int
    workers: int
    settled: bool = False
    """Whether those of its workers that are not there will not come any more: nobody waits for them."""


@dataclass(frozen=True)
class Grow:
    """Submit a job with so many more workers."""

    workers: int


@dataclass(frozen=True)
class Shrink:
    """End the added job: all its workers have been idle for long enough."""

    job_id: str


@dataclass
class Controller:
    """Decides from one look to the next; remembers since when which added job is idle.

    Args:
        keys: `pools.run.autoscale`.
        step: workers that one submission adds at most.
    """

    keys: Autoscale
    step: int
    _idle_since: dict[str, float] = field(default_factory=dict)
    _quiet_until: float = 0.0

    def decide(
        self, now: float, status: Mapping[str, Any], added: Sequence[Added], submissions_left: int
    ) -> Grow | Shrink | None:
        """What to do now, at most one thing.

        Args:
            now: seconds of a clock that only rises.
            status: of the router: `stages.run.queued`, `members` with `id` and `leases`.
            added: the jobs that were added and not ended.
            submissions_left: how many jobs the run may still submit within this hour.
        """
        leases = leases_of(status)
        queued = int(status["stages"]["run"]["queued"])
        idle = self._idle_long_enough(now, queued, leases, added)
        if now < self._quiet_until:
            return None
        there = sum(job.workers for job in added)
        waiting = any(job.workers > _present(job, leases) for job in added if not job.settled)
        if queued > self.keys.queue * max(1, len(leases)) and there < self.keys.max and not waiting:
            if submissions_left < 1:
                return None
            self._quiet_until = now + SETTLE_S
            return Grow(min(self.step, self.keys.max - there))
        if idle is not None:
            self._quiet_until = now + SETTLE_S
            del self._idle_since[idle]
            return Shrink(idle)
        return None

    def _idle_long_enough(
        self, now: float, queued: int, leases: Mapping[int, int], added: Sequence[Added]
    ) -> str | None:
        found = None
        for job in added:
            numbers = range(job.first, job.first + job.workers)
            busy = queued or any(leases.get(number, 0) for number in numbers) or not _present(job, leases)
            if busy:
                self._idle_since.pop(job.job_id, None)
            elif now - self._idle_since.setdefault(job.job_id, now) >= self.keys.idle_s:
                found = job.job_id
        return found


def leases_of(status: Mapping[str, Any]) -> dict[int, int]:
    """What each RUN worker that the router has heard of holds, by its number."""
    return {
        int(match[1]): int(member.get("leases", 0))
        for member in status.get("members") or ()
        if (match := _MEMBER.match(str(member.get("id"))))
    }


def _present(job: Added, leases: Mapping[int, int]) -> int:
    """Workers of an added job that the router has heard of."""
    return sum(number in leases for number in range(job.first, job.first + job.workers))
