"""A real run whose first process of a kind dies at its n-th call: `python -P -m tests.support.crashing_run PLAN ARGS`.

PLAN is `KIND:CALL:N`. Run as the body of a process (the supervisor gives KIND RUN_DIR NUMBER MEMBER), it installs the
plan once, in the first incarnation, and notes in the run directory's log how many calls there were in the end.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from launch import cli, kinds, process, supervisor
from stages import sharedfs
from tests.support.crashes import Crash, CrashingFileSystem

PLAN = "CRASHING_RUN_PLAN"


def start(plan: str, arguments: list[str]) -> int:
    """The rollmill command, with this module as the body of its processes."""
    os.environ[PLAN] = plan
    supervisor.BODY = "tests.support.crashing_run"
    return cli.main(arguments)


def body(arguments: list[str]) -> int:
    """One process, which dies as planned if it is the first of its kind."""
    kind, call, n = os.environ[PLAN].split(":")
    mark = Path(arguments[1]) / "slurm" / f"crashed-{kind}"
    if arguments[0] != kind or mark.exists():
        return process.main(arguments)
    mark.touch()
    with sharedfs.use(CrashingFileSystem(Crash(call, int(n)))):
        return process.main(arguments)


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(body(given) if given[0] in kinds.KINDS else start(given[0], given[1:]))
