"""Small problems of our own with HumanEval's columns, and words of their private columns to search for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SECRETS = ("plover_in_the_reference", "bittern_in_the_test")
"""Names that stand in private columns alone."""

_TOTALS = {
    "prompt": (
        "from typing import List\n\n\ndef double(number: int) -> int:\n    return 2 * number\n\n\n"
        'def running_totals(numbers: List[int]) -> List[int]:\n    """ The sums of all beginnings, each doubled '
        'by `double`.\n    >>> running_totals([1, 2])\n    [2, 6]\n    """\n'
    ),
    "entry_point": "running_totals",
    "canonical_solution": (
        "    plover_in_the_reference, found = 0, []\n    for number in numbers:\n"
        "        plover_in_the_reference += number\n        found.append(double(plover_in_the_reference))\n"
        "    return found\n"
    ),
    "test": (
        "import random\n\nMETADATA = {'author': 'us'}\n\n\ndef check(candidate):\n"
        "    bittern_in_the_test = [[], [1, 2], [5, -7, 9, 0]]\n"
        "    for numbers, found in zip(bittern_in_the_test, map(candidate, bittern_in_the_test)):\n"
        "        assert found == running_totals(numbers)\n"
        "    drawn = [[random.randint(-99, 99) for _ in range(9)] for _ in range(20)]\n"
        "    for numbers, found in zip(drawn, map(candidate, drawn)):\n"
        "        assert found[-1] == 2 * sum(numbers)\n"
    ),
}  # fmt: skip
_WORDS = {
    "prompt": 'def first_words(text: str, n: int = 1) -> dict:\n    """ How often each of n words comes."""\n',
    "entry_point": "first_words",
    "canonical_solution": (
        "    words = text.split()[:n]\n    if n < 0:\n        raise ValueError('n')\n"
        "    return {plover_in_the_reference: words.count(plover_in_the_reference)\n"
        "            for plover_in_the_reference in words}\n"
    ),
    "test": (
        "def check(candidate):\n    bittern_in_the_test = candidate('a b a', n=3)\n"
        "    assert bittern_in_the_test == {'a': 2, 'b': 1} and type(bittern_in_the_test) is dict\n"
        "    assert candidate('') == {}\n"
        "    try:\n        candidate('x', -1)\n    except ValueError:\n        return\n"
        "    raise AssertionError('no ValueError')\n"
    ),
}  # fmt: skip
_SHARE = {
    "prompt": 'def share(part: float, whole: float) -> float:\n    """ part / whole; nan where whole is 0."""\n',
    "entry_point": "share",
    "canonical_solution": "    return part / whole if whole else float('nan')\n",
    "test": (
        "import math\n\ndef check(candidate):\n    assert abs(candidate(1, 4) - 0.25) < 1e-9\n"
        "    assert math.isnan(candidate(1, 0)) is True\n    assert candidate(-10 ** 40, 2.0) == -5e39\n"
    ),
}


def rows() -> list[dict[str, Any]]:
    """The problems as rows."""
    return [{"task_id": f"own/{number}", **row} for number, row in enumerate((_TOTALS, _WORDS, _SHARE))]


def named(names: list[str]) -> list[dict[str, Any]]:
    """The first problem once for each name, which is its task_id."""
    return [{"task_id": name, **_TOTALS} for name in names]


def write(path: Path, given: list[dict[str, Any]]) -> Path:
    """The rows as a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path
