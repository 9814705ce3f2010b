"""A real run whose processes' wall clocks are 30 s apart: `python -P -m tests.support.skewed_run ARGS`."""

from __future__ import annotations

import sys
import time

from launch import cli, kinds, process, supervisor

OFFSETS_S = {"router": 0.0, "init": 30.0, "run": -30.0, "eval": 30.0, "replica": -30.0}


def start(arguments: list[str]) -> int:
    """The rollmill command, with this module as the body of its processes."""
    supervisor.BODY = "tests.support.skewed_run"
    return cli.main(arguments)


def body(arguments: list[str]) -> int:
    """One process, whose wall clock is off; the monotonic clock is its own in any case."""
    real, offset_s = time.time, OFFSETS_S[arguments[0]]
    time.time = lambda: real() + offset_s
    return process.main(arguments)


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(body(given) if given[0] in kinds.KINDS else start(given))
