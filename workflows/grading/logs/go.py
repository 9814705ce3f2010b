"""The output of `go test -v`, as text and as JSON lines (`-json`). Pure."""

from __future__ import annotations

import json
import re
from typing import Final

from workflows.grading.logs.statuses import ERROR, FAILED, PASSED, SKIPPED, lines, put

_RESULT: Final = re.compile(r"\s*--- (PASS|FAIL|SKIP): (\S+)(?: \([\d.]+s\))?")
_BROKEN: Final = re.compile(r"FAIL\s+(\S+) \[(?:build|setup) failed\]")
_STATUS: Final = {"PASS": PASSED, "FAIL": FAILED, "SKIP": SKIPPED}


def parse(log: str) -> dict[str, str]:
    """Statuses by test name, subtests as `Test/sub`; with JSON by `package.Test`; a package that does not build."""
    found: dict[str, str] = {}
    for line in lines(log):
        if line.startswith("{"):
            _event(found, line)
        elif result := _RESULT.fullmatch(line.rstrip()):
            put(found, result[2], _STATUS[result[1]])
        elif broken := _BROKEN.fullmatch(line.rstrip()):
            put(found, broken[1], ERROR)
    return found


def _event(found: dict[str, str], line: str) -> None:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return
    if isinstance(told, dict) and isinstance(told.get("Test"), str) and isinstance(told.get("Package"), str):
        status = _STATUS.get(str(told.get("Action")).upper())
        if status is not None:
            put(found, f"{told['Package']}.{told['Test']}", status)
