"""What a process of nobody's trust may use: resource limits, and time by its own CPU; sent into sandboxes as text.

On a busy node the same answer takes longer: what counts is CPU time, and the wall only stops what waits for ever.
Imports the standard library alone and runs on Python 3.8.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping

SLACK = 3.0
"""Wall seconds a second of CPU time that are waited for on a busy machine, and as many at least."""


def limit(limits: Mapping[str, int]) -> None:
    """In the new process: set each `RLIMIT_name`, soft and hard, as far as the hard one that is there allows."""
    for name, most in limits.items():
        which = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def wall_s(cpu_s: float) -> float:
    """How long so much CPU time is waited for."""
    return SLACK * (cpu_s + 1)


class Budget:
    """CPU seconds of another process from now on, and the wall seconds that they may take.

    Args:
        pid: of a process that nobody has waited for yet.
        cpu_s: what it may use.
    """

    def __init__(self, pid: int, cpu_s: float) -> None:
        self._clock = ~pid << 3 | 2  # what clock_getcpuclockid(3) gives on Linux
        self._used, self._wall = self._cpu() + cpu_s, time.monotonic() + wall_s(cpu_s)

    def left(self) -> float:
        """Seconds after which to look again: less than that cannot use it up; 0 once nothing is left."""
        return max(0.0, min(self._used - self._cpu(), self._wall - time.monotonic()))

    def _cpu(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # it has ended, which its pipe says too
            return 0.0
