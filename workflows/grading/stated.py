"""Which answer a message states last, in the forms that word problems and questions of science are answered in."""

from __future__ import annotations

import re
from typing import Final

MARK: Final = re.compile(r"####|\bthe (?:final )?answer is:?|\\boxed\{", re.IGNORECASE)
"""What stands before the answer of a word problem."""
ANY_MARK: Final = re.compile(
    r"####|\bthe (?:final |correct )?(?:answer|option|choice) is:?|\\f?boxed\{"
    r"|(?:^|(?<=\n))[ \t*_]{0,8}(?:final )?answer[ \t*_]{0,8}:",
    re.IGNORECASE,
)
"""The same and what models write before the answer of any question, `Answer: B` at the beginning of a line among it."""
_END_OF_SENTENCE: Final = re.compile(r"\.(?=\s|$)|\n")
_BRACE: Final = re.compile(r"[{}]")
_DECORATION: Final = " \t\r*_`$"
_LARGEST_TEXT: Final = 20_000
"""Characters at the end of a message in which the answer is looked for; an agent may write as many as it likes."""
_LARGEST_ANSWER: Final = 1000
"""Characters after a mark in which its answer ends, a bound on the work for each mark; `equality.LONGEST` is less."""


def stated_answer(text: str, marks: re.Pattern[str] = MARK) -> str | None:
    """The answer that the last 20,000 characters of a text state last; None where they state none."""
    text = text[-_LARGEST_TEXT:]
    for mark in reversed(list(marks.finditer(text))):
        after = text[mark.end() : mark.end() + _LARGEST_ANSWER]
        if mark[0] == "####":
            told = after.partition("\n")[0]
        elif mark[0].endswith("{"):
            told = _braced(after)
        else:
            told = _END_OF_SENTENCE.split(after, maxsplit=1)[0]
        told = told.strip(_DECORATION).removesuffix(".").strip(_DECORATION)
        if told:
            return told
    return None


def _braced(after: str) -> str:
    """What stands up to the brace that closes; nothing where none does."""
    depth = 1
    for brace in _BRACE.finditer(after):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return after[: brace.start()]
    return ""
