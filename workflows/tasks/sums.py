"""Generates the sums of task=arith: rows, their split, the prompt, and the commands that solve them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from stages.trajectory import Message

Split = Literal["train", "heldout"]

WORKSPACE = "/work"
NUMBERS = "numbers.txt"
NUMBERS_PATH = f"{WORKSPACE}/{NUMBERS}"
SYSTEM = "Use bash. End with: The answer is N."
OPERATORS = "+-*"
"""Operators whose precedence and results are the same in bash's $(( )) and in Python, at every size used here."""

_VARIABLES = "xyz"
_HELDOUT_TENTHS = 2
"""Tenths of all expressions that nobody trains on."""


def split_of(expression: str) -> Split:
    """Which split an expression such as "12+7-4" belongs to: by its digest, so that no seed can mix the two."""
    digest = hashlib.sha256(expression.encode()).digest()
    return "heldout" if digest[0] % 10 < _HELDOUT_TENTHS else "train"


def generate(seed: int, split: Split, file_fraction: float) -> Iterator[dict[str, Any]]:
    """Endless rows of one seed; equal arguments give equal rows, on every machine.

    Args:
        seed: of the generator.
        split: "train" or "heldout"; no expression is in both.
        file_fraction: share of rows, 0 to 1, whose numbers are in a file.
    """
    chooser = random.Random(f"arith {split} {seed}")  # noqa: S311 (sums are no secret)
    number = 0
    while True:
        operands = [str(chooser.randint(0, 99)) for _ in range(chooser.choice((2, 3)))]
        operators = [chooser.choice(OPERATORS) for _ in operands[1:]]
        in_file = _filed(chooser, operands) if chooser.random() < file_fraction else {}
        if split_of(join(operands, operators)) == split:
            yield _row(f"arith-{seed}-{number}", operands, operators, in_file)
            number += 1


def join(operands: list[str], operators: list[str], gap: str = "") -> str:
    """The expression; `gap` stands around each operator."""
    pairs = zip(operators, operands[1:], strict=True)
    return operands[0] + "".join(f"{gap}{operator}{gap}{operand}" for operator, operand in pairs)


def value_of(expression: str) -> int:
    """Evaluate digits joined by + - *, as bash does: products first, then from left to right.

    Raises:
        ValueError: it is no such expression.
    """
    total = 0
    for term in expression.replace("-", "+-").split("+"):
        sign, factors = (-1, term[1:]) if term.startswith("-") else (1, term)
        product = sign
        for factor in factors.split("*"):
            if not (factor.isascii() and factor.isdigit()):
                raise ValueError(f"not a sum of numbers: {expression!r}")
            product *= int(factor)
        total += product
    return total


def prompt_of(row: Mapping[str, Any]) -> list[Message]:
    """The messages an agent starts from."""
    return [Message("system", SYSTEM), Message("user", row["question"])]


def answer_text(value: int) -> str:
    """What the last assistant message has to say."""
    return f"The answer is {value}."


def expression_of(question: str, numbers: str = "") -> str:
    """The bare expression of a question, with each variable replaced by its number.

    Args:
        question: a row's question.
        numbers: content of the numbers file, one NAME=NUMBER a line.

    Raises:
        ValueError: the question has no "= ?", or a variable has no number.
    """
    expression, found, _ = question.partition("= ?")
    if not found:
        raise ValueError(f"the question has no '= ?': {question!r}")
    values = dict(line.split("=", 1) for line in numbers.split())
    for name, value in values.items():
        expression = expression.replace(name, value)
    expression = "".join(expression.split())
    value_of(expression)
    return expression


def _filed(chooser: random.Random, operands: list[str]) -> dict[int, str]:
    """Which operands stand in the file, by position, with the name that replaces each."""
    positions = sorted(chooser.sample(range(len(operands)), chooser.randint(1, len(operands))))
    return dict(zip(positions, _VARIABLES, strict=False))


def _row(task_id: str, operands: list[str], operators: list[str], in_file: Mapping[int, str]) -> dict[str, Any]:
    shown = [in_file.get(position, operand) for position, operand in enumerate(operands)]
    question = join(shown, operators, " ") + " = ?"
    row: dict[str, Any] = {"task_id": task_id, "question": question, "answer": value_of(join(operands, operators))}
    if in_file:
        row["question"] += f" See {NUMBERS}."
        row["files"] = {NUMBERS_PATH: "".join(f"{name}={operands[at]}\n" for at, name in in_file.items())}
    return row
