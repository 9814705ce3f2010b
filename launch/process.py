"""One process of a run: `python -P -m launch.process KIND RUN_DIR NUMBER [MEMBER]`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from launch.kinds import SERVERS, WORKERS, die_with_parent, in_job, supervisor


def main(argv: list[str]) -> int:
    """Run the body to its end; returns the exit code."""
    kind, run_dir, number = argv[0], Path(argv[1]), int(argv[2])
    member = argv[3] if len(argv) > 3 else None
    os.umask(0o077)
    if kind in SERVERS and in_job():
        _outlast_workers()
    die_with_parent(signal.SIGINT if kind in SERVERS else signal.SIGTERM, supervisor())
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


def _outlast_workers() -> None:
    """Be deaf to what Slurm sends to every process of a step at once: workers still have to hand over to us.

    Whoever started this process ends it, by SIGINT, when they are through.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
