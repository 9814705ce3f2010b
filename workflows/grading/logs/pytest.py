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
_ITEM: Final = re.compile(r"\S+?::.")
_SAID: Final = re.compile(r" (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?: \(|$)")
_SHARE: Final = re.compile(r"\[ *\d+%\]")


def parse(log: str) -> dict[str, str]:
    """Statuses by node id; of a module that cannot be imported, by its path."""
    found: dict[str, str] = {}
    told = lines(log)
    last = max((number for number, line in enumerate(told) if _HEADING.fullmatch(line)), default=0)
    for number, line in enumerate(told):
        summary = _SUMMARY.fullmatch(line) if number > last else None  # what tests print is shown before it
        if summary is not None:
            put(found, _node(summary[2]), _STATUS[summary[1]])
        elif verbose := _verbose(line.strip()):
            put(found, verbose[0], _STATUS[verbose[1]])
    return found


def _verbose(line: str) -> tuple[str, str] | None:
    """Node id and status of a line of `-v`, with or without the reason and the share of tests that are done.

    One pass over the line, whatever it is: agents' code prints here, and a pattern that tries again costs its square.
    """
    before, _, last = line.rpartition("[")
    if before.endswith((" ", "\t")) and _SHARE.fullmatch(f"[{last}"):
        line = before.rstrip()
    said = _SAID.search(line)
    if said is None or (said[0].endswith("(") and not line.endswith(")")):
        return None
    return (line[: said.start()], said[1]) if _ITEM.match(line[: said.start()]) else None


def _node(text: str) -> str:
    """A node id without the reason after it; ` - ` within brackets is a parameter's."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if depth <= 0 and text.startswith(" - ", place):
            return text[:place]
    return text.partition(" - ")[0] if depth > 0 else text
