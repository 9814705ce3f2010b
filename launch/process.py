"""One process of a run: `python -P -m launch.process KIND RUN_DIR NUMBER [MEMBER]`."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

KINDS = ("router", "replica", "init", "run", "eval", "trainer")
SERVERS = frozenset({"router", "replica"})
WORKERS = frozenset({"init", "run", "eval"})
IN_JOB = "ROLLMILL_ATTEMPT"
"""Environment variable that a job's leader sets: the run's attempt."""
ORPHAN_TTLS = 4
"""Lease times without any answer of a router after which a worker stops its sandboxes and ends."""
_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Run the body to its end; returns the exit code."""
    kind, run_dir, number = argv[0], Path(argv[1]), int(argv[2])
    member = argv[3] if len(argv) > 3 else None
    os.umask(0o077)
    if kind in SERVERS and in_job():
        _outlast_workers()
    die_with_parent(signal.SIGINT if kind in SERVERS else signal.SIGTERM)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    from launch.bodies import BODIES, open_context
    from launch.failures import describe

    try:
        context = open_context(kind, run_dir, number, member)
        _run(kind, BODIES[kind](context))
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # the last boundary of a process: one line for people, the stack for its log
        if isinstance(error, SystemExit):
            raise
        if os.environ.get("ROLLMILL_DEBUG") == "1":
            raise
        message, code = describe(error)
        logging.getLogger(kind).error("%s", message, exc_info=error)
        sys.stderr.write(f"rollmill: {kind}-{number}: {message}\n")
        return code
    return 0


def _run(kind: str, body: object) -> None:
    """Servers and workers run on uvloop; what starts subprocesses by asyncio does so on its own loop, twice as fast."""
    if kind in SERVERS | WORKERS:
        from stages.web import run

        run(body)  # type: ignore[arg-type]
    else:
        asyncio.run(body)  # type: ignore[arg-type]


def in_job() -> bool:
    """Whether this process is part of a Slurm job's step."""
    return IN_JOB in os.environ


def _outlast_workers() -> None:
    """Be deaf to what Slurm sends to every process of a step at once: workers still have to hand over to us.

    Whoever started this process ends it, by SIGINT, when they are through.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Get this signal when the process that started us ends, however it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() == 1 and os.environ.get("ROLLMILL_SUPERVISED") == "1":
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
