"""The kinds of process that a run has, whether a job holds this one, and what ties it to whoever started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

KINDS: Final = ("router", "replica", "init", "run", "eval", "trainer")
SERVERS: Final = frozenset({"router", "replica"})
WORKERS: Final = frozenset({"init", "run", "eval"})
SUPERVISED: Final = "ROLLMILL_SUPERVISED"
"""Environment variable that whoever starts a process of a run sets: its own pid, which may be 1 in a container."""
IN_JOB: Final = "ROLLMILL_ATTEMPT"
"""Environment variable that a job's leader sets: the run's attempt."""
ORPHAN_TTLS: Final = 4
"""Lease times without any answer of a router after which a worker stops its sandboxes and ends."""
_PR_SET_PDEATHSIG: Final = 1


def in_job() -> bool:
    """Whether this process is part of a Slurm job's step."""
    return IN_JOB in os.environ


def supervised() -> dict[str, str]:
    """The environment of a process that this one starts and that is to end with it."""
    return {**os.environ, SUPERVISED: str(os.getpid())}


def supervisor() -> int | None:
    """The pid of whoever started this process by `supervised`."""
    return int(os.environ[SUPERVISED]) if SUPERVISED in os.environ else None


def die_with_parent(number: signal.Signals = signal.SIGTERM, parent: int | None = None) -> None:
    """Get this signal when the process that started us ends, however it ends; exit where `parent` has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        sys.exit(1)
