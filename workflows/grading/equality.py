"""Whether two mathematical answers are equal: plain numbers at once, everything else by a process of its own.

The answer is a hostile text, and a computer algebra system does what it says: `10^{10^{10}}` would take a worker with
it. So it is read in another process with bounds on time and memory, started at the first need and anew when it died.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from fractions import Fraction
from typing import Final

from stages.errors import VerifierError
from workflows.grading import units

LONGEST: Final = 400
"""Characters of an answer that are looked at; what is longer is no answer."""
_NUMBER: Final = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+", re.ASCII)
_UNIT: Final = re.compile(
    r"(?P<number>\S*\d)\s+(?!(?:hundred|thousand|million|billion|trillion|dozen|percent)\b)[A-Za-z ]+"
)
_SERVER: Final = "workflows.grading.equality_process"


def number(text: str) -> Fraction | None:
    """The value of a plain decimal number, with or without thousands separators and a unit; None for anything else."""
    if len(text) > LONGEST:
        return None
    if with_unit := _UNIT.fullmatch(text):
        text = with_unit["number"]
    return Fraction(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def _words(text: str) -> str:
    """What stands after a plain number."""
    with_unit = _UNIT.fullmatch(text)
    return text[with_unit.end("number") :].strip() if with_unit else ""


def _same_words(gold: str, answer: str) -> bool:
    """Whether two numbers are of the same, as far as both say: `dollar` is `dollars`, and `km` is `kilometers`."""
    if not gold or not answer:
        return True
    read = units.unit(gold), units.unit(answer)
    if None not in read:
        return read[0] == read[1]
    folded = [" ".join(one.casefold().split()).removesuffix("s") for one in (gold, answer)]
    return folded[0] == folded[1]


class Equality:
    """One process that compares. Calls block and may come from any thread; it ends with this process at the latest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def equal(self, gold: str, answer: str) -> bool:
        """Whether `answer` says the same as `gold`; what cannot be read, or not within bounds, does not.

        Raises:
            VerifierError: the process does not start.
        """
        plain = number(gold), number(answer)
        if plain[0] is not None and plain[1] is not None:
            return plain[0] == plain[1] and _same_words(_words(gold), _words(answer))
        if len(answer) > LONGEST:
            return False
        with self._lock:
            return self._ask(gold, answer)

    def close(self) -> None:
        """End the process; idempotent."""
        with self._lock:
            self._drop()

    def _ask(self, gold: str, answer: str) -> bool:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([gold, answer]) + "\n")
            process.stdin.flush()
            said = process.stdout.readline()
        except OSError:
            said = ""
        if not said:  # the answer took more than it may
            self._drop()
        return said == "equal\n"

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
        )  # fmt: skip
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            process.kill()
            process.wait()
            raise VerifierError(f"{_SERVER} does not start: install math-verify and try `python -m {_SERVER}`")
        self._process = process
        return process

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
