"""Runs a row's own checker on what a program printed, where no agent's process is. Sent into sandboxes as text.

Imports the standard library alone and runs on Python 3.8.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

_ACCEPTED, _REFUSED = 0, (1, 2)
"""Exit codes, as of testlib's checkers: accepted, wrong answer, presentation error."""


def main(given: dict[str, Any], tell: Callable[[Any], None]) -> None:
    """Tell for each case whether the checker accepts it, or None where it broke; up to the first that it does not.

    Args:
        given: `checker` (the text of a program that takes three paths: input, expected output, output), `cases`
            (three texts each), `case_s` (seconds a case), `every` (go on after a refusal).
        tell: reports a record.
    """
    with tempfile.TemporaryDirectory() as folder:
        for case in given["cases"]:
            verdict = accepted(given["checker"], case, folder, given["case_s"])
            tell({"accepted": verdict})
            if not (verdict or given["every"]):
                return


def accepted(checker: str, case: list[str], folder: str, within_s: float) -> Any:
    """What the checker says of one case."""
    paths = [folder + "/" + name for name in ("input", "expected", "output")]
    for path, text in zip(paths, case):  # noqa: B905 - strict is newer than Python 3.8
        with open(path, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(text)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-B", "-c", checker, *paths], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, timeout=within_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    if done.returncode == _ACCEPTED:
        return True
    return False if done.returncode in _REFUSED else None
