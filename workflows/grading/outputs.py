"""Whether what a program printed is what it should have printed: word for word, numbers within a tolerance. Pure."""

from __future__ import annotations

import re
from typing import Final

_DECIMAL: Final = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?:\.\d*)?[eE][-+]?\d+)", re.ASCII)
_NUMBER: Final = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)


def same(expected: str, printed: str, relative: float = 0.0, absolute: float = 0.0) -> bool:
    """Whether two outputs have the same words, whatever blanks and line ends are between them.

    Args:
        expected: of the row.
        printed: by the program.
        relative: allowance for words that are decimal numbers in `expected`; whole numbers must be met.
        absolute: likewise; the larger allowance counts.
    """
    wanted, said = expected.split(), printed.split()
    if len(wanted) != len(said):
        return False
    if not (relative or absolute):
        return wanted == said
    return all(one == other or _close(one, other, relative, absolute) for one, other in zip(wanted, said, strict=True))


def _close(wanted: str, said: str, relative: float, absolute: float) -> bool:
    if not (_DECIMAL.fullmatch(wanted) and _NUMBER.fullmatch(said)):
        return False
    return abs(float(wanted) - float(said)) <= max(absolute, relative * abs(float(wanted)))
