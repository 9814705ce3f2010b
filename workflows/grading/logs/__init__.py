"""What test runners print, as statuses by test: pytest, unittest, Django's runner, go test, cargo, jest. Pure.

A log is what a program printed, and an agent's code may print too: whoever rewards by it says `untrusted`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from workflows.grading.logs import cargo, go, jest, pytest, unittest

Parser = Callable[[str], dict[str, str]]
"""From a log to `passed`, `failed`, `error` or `skipped` by the test's name as the runner prints it."""

PARSERS: Final[Mapping[str, Parser]] = {
    "pytest": pytest.parse, "unittest": unittest.parse, "django": unittest.parse, "go": go.parse, "cargo": cargo.parse,
    "jest": jest.parse,
}  # fmt: skip
