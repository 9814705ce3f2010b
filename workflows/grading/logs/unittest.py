"""The output of unittest -v and of Django's test runner at verbosity 2. Pure."""

from __future__ import annotations

import re
from typing import Final

from workflows.grading.logs.statuses import ERROR, FAILED, PASSED, SKIPPED, lines, put

_END: Final = r"(ok|FAIL|ERROR|expected failure|unexpected success|skipped(?: .*)?)"
_WHOLE: Final = re.compile(rf"(\S.*?) \.\.\. {_END}")
_BEGUN: Final = re.compile(r"(\S.*?) \.\.\. ?(.*)")
_ENDED: Final = re.compile(rf"(?:.*\W)??{_END}")
_NAME: Final = re.compile(r"\w+ \([\w.]+\)(?: \(.*\))?")
_HEADING: Final = re.compile(r"(FAIL|ERROR): (\w+ \([\w.]+\))(?: .*)?")
_STATUS: Final = {
    "ok": PASSED, "FAIL": FAILED, "ERROR": ERROR, "expected failure": PASSED, "unexpected success": FAILED,
}  # fmt: skip


def parse(log: str) -> dict[str, str]:
    """Statuses by what is printed of a test, `name (module.Class)`; one with a docstring also by its first line."""
    found: dict[str, str] = {}
    name, waiting = "", ""
    for line in lines(log):
        text = line.strip()
        if heading := _HEADING.fullmatch(text):
            put(found, heading[2], _STATUS[heading[1]])
        elif whole := _WHOLE.fullmatch(text):
            _both(found, name, whole[1], whole[2])
            name, waiting = "", ""
        elif _NAME.fullmatch(text):
            name, waiting = text, ""
        elif begun := _BEGUN.fullmatch(text):  # what the test prints stands between it and its end
            ended = _ENDED.fullmatch(begun[2])
            waiting = "" if ended else begun[1]
            if ended:
                _both(found, name, begun[1], ended[1])
        elif waiting and (ended := _ENDED.fullmatch(text)):
            _both(found, name, waiting, ended[1])
            name, waiting = "", ""
    return found


def _both(found: dict[str, str], name: str, said: str, end: str) -> None:
    status = _STATUS.get(end, SKIPPED)
    put(found, said, status)
    if name and not _NAME.fullmatch(said):
        put(found, name, status)
