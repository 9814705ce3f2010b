"""Compares answers by math-verify in a process of its own: a JSON pair a line in, `equal` or `different` out."""

from __future__ import annotations

import json
import logging
import math
import resource
import signal
import sys
from typing import Any, Final

from math_verify import LatexExtractionConfig, parse, verify

QUESTION_S: Final = 5
ADDRESS_BYTES: Final = 4 << 30
_DECIMALS: Final = 6
_DIGITS: Final = 15
"""What math-verify rounds to by itself; it counts decimals, so that without more of them 6.63e-34 would be 0."""
_MOST_ZEROS: Final = 400


def equal(gold: str, answer: str) -> bool:
    """Whether math-verify reads both and finds them equal; has no bounds of its own."""
    read = [_read(gold), _read(answer)]
    if not (read[0] and read[1]):
        return False
    small = min(_MOST_ZEROS, max(_zeros(one) for found in read for one in found))
    return bool(
        verify(
            read[0], read[1], float_rounding=_DECIMALS + small, numeric_precision=_DIGITS + small, timeout_seconds=None
        )
    )


def _zeros(read: Any) -> int:
    """Zeros after the point of the smallest number within an expression: it is nothing to who rounds before them."""
    found = max((_zeros(one) for one in getattr(read, "args", ())), default=0)
    if getattr(read, "is_number", False):
        size = abs(complex(read.evalf(_DIGITS)))
        if 0 < size < 1:
            found = max(found, -1 - math.floor(math.log10(size)))
    return found


def _read(text: str) -> list[object]:
    """What the whole text means as LaTeX; nothing where it means nothing: a number somewhere in it is no answer."""
    boxed = "\\boxed{" + text + "}"
    found: list[object] = parse(
        boxed, extraction_config=[LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
    )
    return found


def main() -> None:
    """Answer until the input ends; a question that takes too long kills this process, also inside a C function."""
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    equal("1", "\\frac{2}{2}")  # loads what is loaded at the first use
    _say("ready")
    for line in sys.stdin:
        gold, answer = json.loads(line)
        signal.alarm(QUESTION_S)
        try:
            said = "equal" if equal(gold, answer) else "different"
        except Exception:  # noqa: BLE001 - a text that the library stumbles over is no answer
            said = "different"
        signal.alarm(0)
        _say(said)


def _say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
