"""pytest's output: the short summary of `-rA`, and the lines of `-v`. Pure."""

from __future__ import annotations

import re
from typing import Final

from workflows.grading.logs.statuses import ERROR, FAILED, PASSED, SKIPPED, lines, put

_STATUS: Final = {
    "PASSED": PASSED, "FAILED": FAILED, "ERROR": ERROR, "SKIPPED": SKIPPED, "XFAIL": PASSED, "XPASS": PASSED,
}  # fmt: skip
"""An expected failure is what the suite wants; so it counts with SWE-bench's harness."""
_SUMMARY: Final = re.compile(r"(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S.*)")
_HEADING: Final = re.compile(r"=+ short test summary info =+")
_VERBOSE: Final = re.compile(r"(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?: \(.*\))?(?:\s+\[ *\d+%\])?")


def parse(log: str) -> dict[str, str]:
    """Statuses by node id; of a module that cannot be imported, by its path."""
    found: dict[str, str] = {}
    told = lines(log)
    last = max((number for number, line in enumerate(told) if _HEADING.fullmatch(line)), default=0)
    for number, line in enumerate(told):
        summary = _SUMMARY.fullmatch(line) if number > last else None  # what tests print is shown before it
        if summary is not None:
            put(found, _node(summary[2]), _STATUS[summary[1]])
        elif verbose := _VERBOSE.fullmatch(line.strip()):
            put(found, verbose[1], _STATUS[verbose[2]])
    return found


def _node(text: str) -> str:
    """A node id without the reason after it; ` - ` within brackets is a parameter's."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if depth <= 0 and text.startswith(" - ", place):
            return text[:place]
    return text.partition(" - ")[0] if depth > 0 else text
