"""Types of configuration values with the range that each allows, written once beside the type."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Range:
    """Allowed numbers: `low <= x <= high`, or `low < x` where `open_low`; None means no bound on that side."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value lies inside; NaN never does."""
        above = self.low is None or (value > self.low if self.open_low else value >= self.low)
        below = self.high is None or value <= self.high
        return above and below and not math.isnan(value)

    def __str__(self) -> str:
        sign = ">" if self.open_low else ">="
        parts = [f"{sign} {self.low}"] if self.low is not None else []
        parts += [f"<= {self.high}"] if self.high is not None else []
        return " and ".join(parts)


@dataclass(frozen=True)
class Words:
    """Allowed text: without line breaks and NUL, which would break logs, journals and batch scripts.

    With `label`, only what may be part of a file name: letters, digits, `.`, `_` and `-`, a letter or digit first.
    """

    empty: bool = True
    label: bool = False

    def holds(self, value: str) -> bool:
        """Whether the text may stand there."""
        if self.label:
            return _LABEL.fullmatch(value) is not None
        return (self.empty or value.strip() != "") and not any(mark in value for mark in "\n\r\0")

    def __str__(self) -> str:
        if self.label:
            return "letters, digits, '.', '_' and '-'"
        return "one line of text" if self.empty else "one line of text, not empty"


Count = Annotated[int, Range(low=1)]
"""1 or more."""

CountOrZero = Annotated[int, Range(low=0)]
"""0 or more; 0 turns the thing off."""

Seconds = Annotated[float, Range(low=0, open_low=True)]
"""A duration above zero."""

SecondsOrZero = Annotated[float, Range(low=0)]
"""A duration; 0 is allowed."""

Gib = Annotated[float, Range(low=0, open_low=True)]
"""Memory in GiB."""

Share = Annotated[float, Range(low=0, high=1, open_low=True)]
"""A part of the whole: above 0, at most 1."""

Temperature = Annotated[float, Range(low=0, high=100)]
"""Sampling temperature; 0 is greedy."""

Seed = Annotated[int, Range(low=0, high=2**63 - 1)]
"""A seed that fits a signed 64-bit integer, as the shards store it."""

Priority = Annotated[int, Range(low=0, high=100)]
"""0 (last) to 100 (first)."""

Line = Annotated[str, Words()]
"""One line of text, possibly empty."""

Name = Annotated[str, Words(empty=False)]
"""One line of text, not empty."""

Label = Annotated[str, Words(empty=False, label=True)]
"""A name that may be part of a file name, at most 64 characters."""
