"""Units of measurement as factors and dimensions: SI with its prefixes, and what questions of science use beside it.

Factors are exact where their definition is (SI brochure, 9th edition, 2019; NIST SP 811 for the others). Pure.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final, NamedTuple

Dimension = tuple[int, int, int, int, int, int, int]
"""Powers of metre, kilogram, second, ampere, kelvin, mole, candela."""
NONE: Final[Dimension] = (0, 0, 0, 0, 0, 0, 0)
_MOST_POWER: Final = 12


class Unit(NamedTuple):
    """A value in this unit is `value * factor + offset` in SI's base units."""

    factor: Fraction
    dimension: Dimension
    offset: Fraction = Fraction(0)


def _unit(factor: str, *powers: int) -> Unit:
    return Unit(Fraction(factor), (*powers, *NONE[len(powers) :]))  # type: ignore[arg-type]


_PREFIXES: Final = {
    "Q": 30, "R": 27, "Y": 24, "Z": 21, "E": 18, "P": 15, "T": 12, "G": 9, "M": 6, "k": 3, "h": 2, "da": 1, "d": -1,
    "c": -2, "m": -3, "u": -6, "µ": -6, "μ": -6, "n": -9, "p": -12, "f": -15, "a": -18, "z": -21, "y": -24,
}  # fmt: skip
_LONG_PREFIXES: Final = {
    "tera": 12, "giga": 9, "mega": 6, "kilo": 3, "hecto": 2, "deca": 1, "deci": -1, "centi": -2, "milli": -3,
    "micro": -6, "nano": -9, "pico": -12, "femto": -15, "atto": -18,
}  # fmt: skip
_PREFIXED: Final = {
    "m": _unit("1", 1), "g": _unit("0.001", 0, 1), "s": _unit("1", 0, 0, 1), "A": _unit("1", 0, 0, 0, 1),
    "K": _unit("1", 0, 0, 0, 0, 1), "mol": _unit("1", 0, 0, 0, 0, 0, 1), "cd": _unit("1", 0, 0, 0, 0, 0, 0, 1),
    "Hz": _unit("1", 0, 0, -1), "N": _unit("1", 1, 1, -2), "Pa": _unit("1", -1, 1, -2), "J": _unit("1", 2, 1, -2),
    "W": _unit("1", 2, 1, -3), "C": _unit("1", 0, 0, 1, 1), "V": _unit("1", 2, 1, -3, -1),
    "F": _unit("1", -2, -1, 4, 2), "Ω": _unit("1", 2, 1, -3, -2), "S": _unit("1", -2, -1, 3, 2),
    "Wb": _unit("1", 2, 1, -2, -1), "T": _unit("1", 0, 1, -2, -1), "H": _unit("1", 2, 1, -2, -2),
    "lm": _unit("1", 0, 0, 0, 0, 0, 0, 1), "lx": _unit("1", -2, 0, 0, 0, 0, 0, 1), "Bq": _unit("1", 0, 0, -1),
    "Gy": _unit("1", 2, 0, -2), "Sv": _unit("1", 2, 0, -2), "kat": _unit("1", 0, 0, -1, 0, 0, 1),
    "L": _unit("0.001", 3), "l": _unit("0.001", 3), "M": _unit("1000", -3, 0, 0, 0, 0, 1), "rad": _unit("1"),
    "eV": _unit("1.602176634e-19", 2, 1, -2), "cal": _unit("4.184", 2, 1, -2), "bar": _unit("1e5", -1, 1, -2),
    "Da": _unit("1.66053906660e-27", 0, 1), "pc": _unit("3.0856775814913673e16", 1), "Wh": _unit("3600", 2, 1, -2),
    "Ci": _unit("3.7e10", 0, 0, -1), "G": _unit("1e-4", 0, 1, -2, -1), "yr": _unit("31557600", 0, 0, 1),
    "D": _unit("3.33564e-30", 1, 0, 1, 1),
}  # fmt: skip
_PLAIN: Final = {
    "%": _unit("0.01"), "percent": _unit("0.01"), "ppm": _unit("1e-6"), "ppb": _unit("1e-9"), "sr": _unit("1"),
    "°": _unit("0.0174532925199432957692"), "deg": _unit("0.0174532925199432957692"),
    "rev": _unit("6.28318530717958647693"), "rpm": _unit("0.104719755119659774615", 0, 0, -1),
    "min": _unit("60", 0, 0, 1), "h": _unit("3600", 0, 0, 1), "hr": _unit("3600", 0, 0, 1),
    "d": _unit("86400", 0, 0, 1), "day": _unit("86400", 0, 0, 1), "week": _unit("604800", 0, 0, 1),
    "y": _unit("31557600", 0, 0, 1), "u": _unit("1.66053906660e-27", 0, 1), "amu": _unit("1.66053906660e-27", 0, 1),
    "Å": _unit("1e-10", 1), "AU": _unit("149597870700", 1), "au": _unit("149597870700", 1),
    "ly": _unit("9460730472580800", 1), "ha": _unit("1e4", 2), "t": _unit("1000", 0, 1),
    "atm": _unit("101325", -1, 1, -2), "mmHg": _unit("133.322387415", -1, 1, -2),
    "torr": Unit(Fraction(101325, 760), (-1, 1, -2, 0, 0, 0, 0)), "psi": _unit("6894.757293168", -1, 1, -2),
    "Torr": Unit(Fraction(101325, 760), (-1, 1, -2, 0, 0, 0, 0)), "erg": _unit("1e-7", 2, 1, -2),
    "dyn": _unit("1e-5", 1, 1, -2), "P": _unit("0.1", -1, 1, -1), "cP": _unit("0.001", -1, 1, -1),
    "in": _unit("0.0254", 1), "inch": _unit("0.0254", 1), "ft": _unit("0.3048", 1), "foot": _unit("0.3048", 1),
    "feet": _unit("0.3048", 1), "yd": _unit("0.9144", 1), "mi": _unit("1609.344", 1), "mile": _unit("1609.344", 1),
    "mph": _unit("0.44704", 1, 0, -1), "kph": Unit(Fraction(5, 18), (1, 0, -1, 0, 0, 0, 0)),
    "lb": _unit("0.45359237", 0, 1), "lbs": _unit("0.45359237", 0, 1), "lbf": _unit("4.4482216152605", 1, 1, -2),
    "oz": _unit("0.028349523125", 0, 1), "hp": _unit("745.69987158227022", 2, 1, -3),
    "Btu": _unit("1055.05585262", 2, 1, -2), "BTU": _unit("1055.05585262", 2, 1, -2), "cc": _unit("1e-6", 3),
    "°C": Unit(Fraction(1), (0, 0, 0, 0, 1, 0, 0), Fraction("273.15")),
    "°F": Unit(Fraction(5, 9), (0, 0, 0, 0, 1, 0, 0), Fraction(45967, 180)),
}  # fmt: skip
_NAMES: Final = {
    "metre": "m", "meter": "m", "gram": "g", "second": "s", "sec": "s", "ampere": "A", "amp": "A", "kelvin": "K",
    "mole": "mol", "candela": "cd", "hertz": "Hz", "newton": "N", "pascal": "Pa", "joule": "J", "watt": "W",
    "coulomb": "C", "volt": "V", "farad": "F", "ohm": "Ω", "siemens": "S", "weber": "Wb", "tesla": "T", "henry": "H",
    "lumen": "lm", "lux": "lx", "becquerel": "Bq", "gray": "Gy", "sievert": "Sv", "litre": "L", "liter": "L",
    "molar": "M", "radian": "rad", "electronvolt": "eV", "calorie": "cal", "parsec": "pc", "dalton": "Da",
    "gauss": "G", "degree": "°", "minute": "min", "hour": "h", "year": "yr", "angstrom": "Å", "tonne": "t",
    "pound": "lb", "ounce": "oz", "yard": "yd", "atmosphere": "atm", "celsius": "°C", "fahrenheit": "°F",
    "revolution": "rev", "hectare": "ha", "curie": "Ci", "debye": "D", "horsepower": "hp", "dyne": "dyn",
}  # fmt: skip
_SPELLED: Final = (
    (re.compile(r"\\(?:text|mathrm|rm|textrm|operatorname|mathit|unit|si|mbox)\s?\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\(?:rm|mathrm|displaystyle)(?![A-Za-z])"), " "),
    (re.compile(r"\^\s?\{?\s?(?:\\circ|°)\s?\}?|\\degree(?![A-Za-z])|\\circ(?![A-Za-z])|º|˚"), "°"),
    (re.compile(r"\\(?:Omega|ohm)(?![A-Za-z])|\N{OHM SIGN}"), "Ω"), (re.compile(r"\\(?:mu|micro)(?![A-Za-z])\s?"), "μ"),
    (re.compile(r"\\(?:AA|angstrom)(?![A-Za-z])|\N{ANGSTROM SIGN}"), "Å"), (re.compile(r"\\%"), "%"),
    (re.compile(r"\\(?:cdot|times|ast)(?![A-Za-z])|[⋅·×*]"), " "), (re.compile(r"\\[,;:!> ]|\\q?quad(?![a-z])|~"), " "),
    (re.compile(r"\bdegrees?\s+(?=celsius|fahrenheit|[CF]\b)|\bdeg\s?(?=[CF]\b)|°\s+(?=[CF]\b)", re.I), "°"),
    (re.compile(r"°celsius", re.I), "°C"), (re.compile(r"°fahrenheit", re.I), "°F"), (re.compile(r"[℃]"), "°C"),
    (re.compile(r"[−–]"), "-"), (re.compile(r"[{}$]"), ""),
)  # fmt: skip
_SUPERSCRIPTS: Final = {ord(sign): f"^{digit}" for sign, digit in zip("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789", strict=True)}
_FRACTION: Final = re.compile(r"\\[dt]?frac\s?\{((?:[^{}]|\{[^{}]*\})*)\}\s?\{((?:[^{}]|\{[^{}]*\})*)\}")
_FACTOR: Final = re.compile(
    r"\s*(/|per\b)?\s*(\(?)\s*([A-Za-zΩµμÅ°%]+)\s*(?:(?:\^|\*\*)?\s*\(?([+-]?\d{1,2})\)?)?(\)?)"
)
_WORD_POWERS: Final = ((re.compile(r"\b(?:square|sq\.?)\s+([A-Za-z]+)"), r"\1^2"),
                       (re.compile(r"\bcubic\s+([A-Za-z]+)"), r"\1^3"),
                       (re.compile(r"\b([A-Za-z]+)\s+squared\b"), r"\1^2"),
                       (re.compile(r"\b([A-Za-z]+)\s+cubed\b"), r"\1^3"))  # fmt: skip


def unit(text: str) -> Unit | None:
    r"""The unit that a text names; None where it names none that is known.

    Products (blank, dot, `\cdot`), quotients (`/`, `per`, `\frac`), powers (`m^2`, `m²`, `s-1`), SI prefixes, names
    in one or several, and LaTeX's wrappers are understood. A degree of temperature has its offset where it stands
    alone.
    """
    text = spelled(_FRACTION.sub(r" \1 / ( \2 ) ", text)).strip().removesuffix(".").strip()
    for words, raised in _WORD_POWERS:
        text = words.sub(raised, text)
    return _one(text) or _product(text)


def _product(text: str) -> Unit | None:
    """Several units; what follows a solidus is below it, with or without brackets, as in J/mol K."""
    factor, powers, at = Fraction(1), [0] * 7, 0
    below = False
    while text[at:].strip():
        found = _FACTOR.match(text, at)
        one = None if found is None else _one(found[3])
        power = 0 if found is None else int(found[4] or "1")
        if found is None or one is None or abs(power) > _MOST_POWER:
            return None
        below = below or found[1] is not None
        signed = -power if below else power
        factor *= one.factor**signed
        powers = [have + signed * more for have, more in zip(powers, one.dimension, strict=True)]
        at = found.end()
        closing = text[at:].lstrip().startswith(")")
        if closing:
            at = text.index(")", at) + 1
        if closing or found[5]:
            below = False
    return Unit(factor, tuple(powers)) if at else None  # type: ignore[arg-type]


def spelled(text: str) -> str:
    """LaTeX's and typography's ways of writing units, written plainly."""
    text = text.translate(_SUPERSCRIPTS).replace("⁻", "^-").replace("^-^", "^-")
    for pattern, plain in _SPELLED:
        text = pattern.sub(plain, text)
    return text


def _one(word: str) -> Unit | None:
    """A unit that is one word."""
    if word in _PLAIN:
        return _PLAIN[word]
    if word in _PREFIXED:
        return _PREFIXED[word]
    for prefix, power in _PREFIXES.items():
        rest = _PREFIXED.get(word.removeprefix(prefix)) if word.startswith(prefix) else None
        if rest is not None:
            return Unit(rest.factor * Fraction(10) ** power, rest.dimension)
    return _named(word)


def _named(word: str) -> Unit | None:
    lower = word.lower()
    for name in (lower, lower.removesuffix("s"), lower.removesuffix("es"), {"inches": "inch"}.get(lower, lower)):
        if name in _NAMES:
            return _one(_NAMES[name])
        if name in _PLAIN and len(name) > 1:
            return _PLAIN[name]
        for prefix, power in _LONG_PREFIXES.items():
            short = _NAMES.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
            if short is not None and short in _PREFIXED:
                return Unit(_PREFIXED[short].factor * Fraction(10) ** power, _PREFIXED[short].dimension)
    return None
