"""Numbers with units as answers state them: read exactly, compared within a tolerance. Pure."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final, NamedTuple

from workflows.grading import units

LONGEST: Final = 400
"""Characters of an answer that are looked at; what is longer is no answer."""
_MOST_EXPONENT: Final = 400
_LEAD: Final = re.compile(
    r"^\s*(?:[A-Za-z](?:_\{?\w{1,8}\}?|\([A-Za-z]\))?\s*(?:=|\\approx|\\simeq|≈)|about|approximately|roughly"
    r"|\\approx|\\simeq|\\sim|≈|~|=)\s*",
    re.ASCII,
)
_DIGITS: Final = r"(?:\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)|\d{1,3}(?:(?:\\,|\\ |\u202f|\u00a0|\\;)\d{3})+(?!\d)|\d+)"
_NUMBER: Final = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>{_DIGITS})(?P<part>\.\d*)?|(?P<bare>\.\d+))"
    r"(?:[eE](?P<e>[-+]?\d{1,4})(?![\d.])"
    r"|\s*(?:\\times|\\cdot|×|·|⋅|\*|x)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*(?P<braced>[-+]?\d{1,4})\s*\}"
    r"|\(\s*(?P<round>[-+]?\d{1,4})\s*\)|(?P<plain>[-+]?\d{1,4})))?",
    re.ASCII,
)
_POWER: Final = re.compile(
    r"(?P<sign>[-+]?)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*([-+]?\d{1,4})\s*\}|([-+]?\d{1,4}))", re.ASCII
)
_RATIO: Final = re.compile(
    r"(?P<sign>[-+]?)\s*(?:\\[dt]?frac\s*\{\s*(?P<a>[-+]?\d{1,15})\s*\}\s*\{\s*(?P<b>\d{1,15})\s*\}"
    r"|(?P<c>\d{1,15})\s*/\s*(?P<d>\d{1,15}))",
    re.ASCII,
)
_SCALES: Final = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip
_SCALE: Final = re.compile(rf"\s+({'|'.join(_SCALES)})\b")
_SIGNS: Final = str.maketrans({"−": "-", "–": "-"})
_EXPONENT_SIGNS: Final = {ord(sign): digit for sign, digit in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True)}
_RAISED: Final = re.compile(r"10(⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)")


class Quantity(NamedTuple):
    """A number as it is stated.

    Args:
        value: the number, without its unit.
        unit: what it is of; None where it stands alone.
        exact: a whole number or a ratio: nothing says that it was rounded.
    """

    value: Fraction
    unit: units.Unit | None
    exact: bool

    @property
    def si(self) -> Fraction:
        """The value in base units; the plain number where there is no unit."""
        return self.value if self.unit is None else self.value * self.unit.factor + self.unit.offset


def quantity(text: str) -> Quantity | None:
    r"""The number with its unit that the whole text is; None where it is anything else.

    `1.5e-3`, `1.5 \times 10^{-3}`, `10^6`, `1,500`, `3/4`, `\frac{3}{4}`, `50\%`, `5 million`; `x =` and `about` may
    stand before it.
    """
    if len(text) > LONGEST:
        return None
    text = text.translate(_SIGNS).strip().strip("$").strip()
    text = _RAISED.sub(lambda found: f"10^{{{found[1].translate(_EXPONENT_SIGNS)}}}", text)
    text = _LEAD.sub("", text, count=1).removeprefix("\\$").strip()
    read = _value(text)
    if read is None:
        return None
    value, exact, rest = read
    scale = _SCALE.match(rest)
    if scale is not None:
        value, rest = value * _SCALES[scale[1]], rest[scale.end() :]
    if not units.spelled(rest).strip().removesuffix("."):
        return Quantity(value, None, exact)
    unit = units.unit(rest)
    return None if unit is None else Quantity(value, unit, exact)


def _value(text: str) -> tuple[Fraction, bool, str] | None:
    """The number that a text begins with, whether it is exact, and what follows it."""
    ratio = _RATIO.match(text)
    if ratio is not None:
        above, below = int(ratio["a"] or ratio["c"]), int(ratio["b"] or ratio["d"])
        if below == 0:
            return None
        return Fraction(above, below) * (-1 if ratio["sign"] == "-" else 1), True, text[ratio.end() :]
    power = _POWER.match(text)
    if power is not None:
        exponent = int(power[2] or power[3])
        if abs(exponent) > _MOST_EXPONENT:
            return None
        return Fraction(10) ** exponent * (-1 if power["sign"] == "-" else 1), exponent >= 0, text[power.end() :]
    found = _NUMBER.match(text)
    if found is None:
        return None
    digits = re.sub(r"[^\d]", "", found["whole"] or "0") + (found["part"] or found["bare"] or "")
    exponent_text = found["e"] or found["braced"] or found["round"] or found["plain"]
    exponent = int(exponent_text or "0")
    if abs(exponent) > _MOST_EXPONENT:
        return None
    value = Fraction(digits.removesuffix(".") or "0") * Fraction(10) ** exponent
    exact = exponent_text is None and not found["part"] and not found["bare"]
    return (-value if found["sign"] == "-" else value), exact, text[found.end() :]


def agree(
    gold: Quantity, stated: Quantity, *, relative: Fraction, absolute: Fraction = Fraction(0), unit_needed: bool = False
) -> bool:
    """Whether two quantities are the same within `max(absolute, relative * |gold|)`, both in the gold's unit.

    A number without a unit is taken to be in the gold's, unless `unit_needed`; of a percentage the share counts too.
    Where the gold has no unit, the stated number counts, a percentage as its share.
    """
    if gold.unit is None:
        share = stated.unit is not None and stated.unit.dimension == units.NONE and stated.unit.factor < 1
        candidates = [stated.value, stated.si] if share and stated.unit is not None else [stated.value]
        return any(_close(gold.value, one, relative, absolute) for one in candidates)
    if stated.unit is None:
        if unit_needed:
            return False
        percent = gold.unit.dimension == units.NONE and gold.unit.factor == Fraction(1, 100)
        candidates = [stated.value, stated.value * 100] if percent else [stated.value]
        return any(_close(gold.value, one, relative, absolute) for one in candidates)
    if stated.unit.dimension != gold.unit.dimension:
        return False
    converted = (stated.si - gold.unit.offset) / gold.unit.factor
    return _close(gold.value, converted, relative, absolute)


def _close(gold: Fraction, stated: Fraction, relative: Fraction, absolute: Fraction) -> bool:
    return abs(gold - stated) <= max(absolute, relative * abs(gold), abs(gold) / 10**9)
