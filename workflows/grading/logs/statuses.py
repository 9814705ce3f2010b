"""The statuses of tests that a log tells of, and which of two counts where it tells twice. Pure."""

from __future__ import annotations

import re
from typing import Final

PASSED: Final = "passed"
FAILED: Final = "failed"
ERROR: Final = "error"
SKIPPED: Final = "skipped"
_WORSE: Final = (SKIPPED, PASSED, FAILED, ERROR)
LONGEST: Final = 4000
"""Characters of a line that are looked at: names are shorter, and an agent's code may print what it likes."""
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def lines(log: str) -> list[str]:
    """The lines of a log without colours, the long ones cut."""
    return [line[:LONGEST] for line in _COLOUR.sub("", log).splitlines()]


def put(found: dict[str, str], name: str, status: str) -> None:
    """Keep a test's status; of two the worse one."""
    if name and _WORSE.index(status) >= _WORSE.index(found.get(name, SKIPPED)):
        found[name] = status
