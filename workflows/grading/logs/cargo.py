"""The output of `cargo test`. Pure."""

from __future__ import annotations

import re
from typing import Final

from workflows.grading.logs.statuses import ERROR, FAILED, PASSED, SKIPPED, lines, put

_RESULT: Final = re.compile(r"test (\S.*?)(?: - should panic)? \.\.\. (ok|FAILED|ignored)(, .*| <.*)?")
_BEGUN: Final = re.compile(r"test (\S.*?)(?: - should panic)? \.\.\. .*")
_ENDED: Final = re.compile(r".*?(ok|FAILED)")
_BROKEN: Final = re.compile(r"error: could not compile `([^`]+)`.*")
_STATUS: Final = {"ok": PASSED, "FAILED": FAILED, "ignored": SKIPPED}


def parse(log: str) -> dict[str, str]:
    """Statuses by the test's path; documentation tests as they are printed; a crate that does not compile."""
    found: dict[str, str] = {}
    waiting = ""
    for line in lines(log):
        text = line.strip()
        if (result := _RESULT.fullmatch(text)) and (not (result[3] or "").startswith(" <") or text.endswith(">")):
            put(found, result[1], _STATUS[result[2]])
            waiting = ""
        elif broken := _BROKEN.fullmatch(text):
            put(found, broken[1], ERROR)
        elif begun := _BEGUN.fullmatch(text):  # with --nocapture what the test prints comes first
            waiting = begun[1]
        elif waiting and (ended := _ENDED.fullmatch(text)):
            put(found, waiting, _STATUS[ended[1]])
            waiting = ""
    return found
