"""The output of `jest --verbose`. Pure."""

from __future__ import annotations

import re
from typing import Final

from workflows.grading.logs.statuses import ERROR, FAILED, PASSED, SKIPPED, lines, put

_SUITE: Final = re.compile(r"(PASS|FAIL)\s+(\S+)(?: \([\d.]+ m?s\))?")
_TEST: Final = re.compile(r"(\s*)([✓√✕×○✎]) (.*?)(?: \([\d.]+ m?s\))?")
_BLOCK: Final = re.compile(r"(\s+)(\S.*)")
_STATUS: Final = {"✓": PASSED, "√": PASSED, "✕": FAILED, "×": FAILED, "○": SKIPPED, "✎": SKIPPED}
_BROKEN: Final = "Test suite failed to run"


def parse(log: str) -> dict[str, str]:
    """Statuses by the names of the blocks and the test, joined by ` > `; a suite that cannot run, by its path."""
    found: dict[str, str] = {}
    suite, blocks = "", [(-1, "")]
    within = False  # the tree of names ends at the first empty line after it, details of failures follow
    for line in lines(log):
        if header := _SUITE.fullmatch(line.strip()):
            suite, blocks, within = header[2], [(-1, "")], True
        elif _BROKEN in line and suite:
            put(found, suite, ERROR)
        elif not line.strip() or line.lstrip().startswith("●"):
            within = within and len(blocks) == 1 and not line.strip()
        elif within and (test := _TEST.fullmatch(line)):
            name = test[3].removeprefix("skipped ") if test[2] == "○" else test[3]
            put(found, " > ".join([*_above(blocks, len(test[1])), name]), _STATUS[test[2]])
        elif within and (block := _BLOCK.fullmatch(line)):
            _above(blocks, len(block[1]))
            blocks.append((len(block[1]), block[2]))
    return found


def _above(blocks: list[tuple[int, str]], depth: int) -> list[str]:
    """The names of the blocks that a line of that depth stands in; deeper ones are over."""
    while blocks[-1][0] >= depth:
        blocks.pop()
    return [name for _, name in blocks[1:]]
