"""Multiple choice: which letters an answer names, by themselves or by the choice's own words. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LONGEST: Final = 1000
_WRAPPED: Final = re.compile(r"\\(?:text|mathrm|mathbf|textbf|rm|bf|boxed|operatorname)\s?\{([^{}]*)\}")
_ONE: Final = r"\(?\[?([A-Z])\]?\)?"
_SINGLE: Final = re.compile(
    rf"(?:(?:option|choice|answer)\s+)?{_ONE}\s*(?:[.):]\s*(?P<text>.+)|[-–]\s+(?P<dash>.+)|\.)?",
    re.IGNORECASE | re.DOTALL,
)
_SEVERAL: Final = re.compile(
    rf"(?:(?:options|choices)\s+)?{_ONE}(?:\s*(?:,\s*and|,|;|&|and|\+)\s*{_ONE})+\.?", re.IGNORECASE
)
_RUN: Final = re.compile(r"[A-Z]{2,}")
_MARKER: Final = re.compile(r"^\s*\(?([A-Z])[.):]\s+")


def listed(choices: Any) -> list[str] | None:
    """A row's choices as texts in order, without the letters that they may begin with; None where they are none.

    Args:
        choices: a list of texts, or a map of letters to texts.
    """
    if isinstance(choices, Mapping):
        if list(choices) != list(LETTERS[: len(choices)]):
            return None
        choices = list(choices.values())
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
        return None
    if not all(isinstance(one, str) and one.strip() for one in choices):
        return None
    marks = [_MARKER.match(one) for one in choices]
    if all(mark is not None and mark[1] == LETTERS[place] for place, mark in enumerate(marks)):
        return [_MARKER.sub("", one).strip() for one in choices]
    return [one.strip() for one in choices]


def chosen(answer: str, choices: Sequence[str]) -> frozenset[str] | None:
    r"""The letters that an answer names; None where it names none, or leaves open which.

    `B`, `(b)`, `B.`, `B) its text`, `option B`, `\text{B}`, `A, C`, `A and C`, `AC`, and a choice's own words. A
    letter with the words of another choice leaves it open, and so does `A or B`.
    """
    if len(answer) > LONGEST:
        return None
    plain = _plain(answer)
    words = _by_words(plain, choices)
    if words is not None:
        return frozenset(words)
    single = _SINGLE.fullmatch(plain)
    if single is not None:
        letter = single[1].upper()
        said = single["text"] or single["dash"]
        if said is not None and _SEVERAL.fullmatch(plain) is None:
            other = _by_words(said, choices)
            if (other is not None and other != letter) or letter not in LETTERS[: len(choices)]:
                return None
            return frozenset(letter)
        if said is None:
            return frozenset(letter) if letter in LETTERS[: len(choices)] else None
    if _SEVERAL.fullmatch(plain) is not None:
        letters = re.findall(r"\b[A-Z]\b", re.sub(r"\band\b|options|choices", " ", plain, flags=re.IGNORECASE).upper())
    elif _RUN.fullmatch(plain) is not None:
        letters = list(plain)
    else:
        return None
    whole = len(set(letters)) == len(letters) and set(letters) <= set(LETTERS[: len(choices)])
    return frozenset(letters) if whole else None


def _plain(text: str) -> str:
    for _ in range(4):
        text = _WRAPPED.sub(r"\1", text)
    return " ".join(text.replace("$", " ").replace("**", " ").split())


def _by_words(text: str, choices: Sequence[str]) -> str | None:
    """The letter of the one choice that a text is, letter case and a last stop aside."""
    said = _folded(text)
    found = [LETTERS[place] for place, choice in enumerate(choices) if _folded(_plain(choice)) == said]
    return found[0] if len(found) == 1 else None


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).removesuffix(".")
