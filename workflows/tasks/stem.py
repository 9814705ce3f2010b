"""task=stem: questions of science: numbers with units, multiple choice, symbols; with the Python tool."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

from sandbox.protocols import Sandbox
from stages.errors import VerifierError
from stages.protocols import Reward, Row
from stages.trajectory import Message, Trajectory
from workflows.errors import TaskDataError
from workflows.grading import choices as lettered
from workflows.grading import units
from workflows.grading.equality import Equality, number
from workflows.grading.quantities import Quantity, agree, quantity
from workflows.grading.stated import ANY_MARK, stated_answer
from workflows.tasks.datasets import reader
from workflows.tasks.lines import LinesTask, last_words
from workflows.tasks.rows import wrong_texts
from workflows.tools import python

NUMERIC, CHOICE, SYMBOLIC, TEXT = "numeric", "choice", "symbolic", "text"
KINDS: Final = (NUMERIC, CHOICE, SYMBOLIC, TEXT)
COLUMNS: Final = (
    "task_id", "question", "answer", "kind", "unit", "unit_required", "tolerance", "absolute", "choices", "domain",
)  # fmt: skip
"""A column that is not among these is dropped: it might be the solution by another name."""
_DECIMALS: Final = re.compile(r"\.\d", re.ASCII)
_WORDS: Final = re.compile(r"\\(?:text|mathrm|rm|mbox)\b", re.ASCII)
_SYSTEM: Final = (
    "You solve problems of science and mathematics. You have Python for calculations. When you are done, end with one "
    "line that states the final answer: \\boxed{ANSWER}"
)
_ASKED: Final = {
    NUMERIC: "State a number, with its unit where it has one.",
    CHOICE: "State the letter of your choice, or the letters where several are right.",
}


class StemTask(LinesTask):
    r"""Questions with a short answer; the one that the last assistant message states last counts.

    An answer is stated as `\boxed{...}`, `The answer is ...`, `Answer: ...` at the beginning of a line, or `#### ...`.
    The reward is 1.0 where it is right, else 0.0; its parts: `correct`, and `format` (an answer was stated). The
    columns of a row:

    - question, answer (private): texts.
    - kind: `numeric`, `choice`, `symbolic` or `text`. Where it is not given: `choice` with choices, `numeric` where the
      answer is a number, else `symbolic`.
    - unit, unit_required: of a numeric answer that does not bring its own; whether one must be stated. Units are
      converted; a stated number without one is taken to be in the row's unit.
    - tolerance, absolute: relative to the answer, and in its unit; the larger allowance counts. Where there is
      neither, a whole number or a ratio without a unit must be met, and everything else within the task's tolerance.
    - choices: a list of texts, or letters to texts; the answer is a letter, letters with commas, or a choice's text.
    - task_id: `stem-LINE` where there is none.

    Args:
        path: JSONL or Parquet with those columns, or with a data set's own (see `columns`).
        limit: number of rows; None is all.
        columns: whose columns they are: rows (the above), scp-116k, deepscaler or eurus-2.
        tolerance: relative allowance for numbers that were rounded, where a row does not say.

    Raises:
        TaskDataError: an option is out of range.
    """

    name = "stem"
    columns = "question and answer columns"
    private = frozenset({"answer", "tolerance", "absolute"})

    def __init__(
        self, path: str | None = None, limit: int | None = None, columns: str = "rows", tolerance: float = 0.01
    ) -> None:
        super().__init__(path, limit)
        if not 0 <= tolerance < 1:
            raise TaskDataError(f"task.options.tolerance: got {tolerance}; allowed: 0 to 1, 1 excluded")
        self._read, self._tolerance = reader(columns, "stem"), Fraction(str(tolerance))
        self._equality = Equality()

    def checked(self, row: dict[str, Any], number: int) -> dict[str, Any] | str | None:
        """A row whose own answer could not be graded is none; only known columns stay."""
        read = self._read(row, number)
        if read is None or isinstance(read, str):
            return read
        row = {"task_id": f"stem-{number}", **{name: value for name, value in read.items() if name in COLUMNS}}
        if not isinstance(row["task_id"], str) or not row["task_id"]:
            return "task_id is no text, or empty"
        row = {name: value for name, value in row.items() if value is not None}
        wrong = _wrong(row)
        return wrong or {**row, "kind": _kind(row)}

    def prompt(self, row: Row) -> list[Message]:
        """The question, its choices, and what to state."""
        parts = [row["question"].strip()]
        if row["kind"] == CHOICE:
            listed = lettered.listed(row["choices"]) or []
            parts.append("\n".join(f"{letter}) {text}" for letter, text in zip(lettered.LETTERS, listed, strict=False)))
        if asked := _ASKED.get(row["kind"]):
            parts.append(f"{asked} (The unit is {row['unit']}.)" if row.get("unit") else asked)
        return [Message("system", _SYSTEM), Message("user", "\n\n".join(parts))]

    def tools(self, row: Row) -> list[dict[str, Any]]:
        """The Python tool."""
        return [python.SCHEMA]

    async def verify(self, sandbox: Sandbox, row: Row, trajectory: Trajectory) -> Reward:
        """Compare what the last assistant message states last; the sandbox is not looked at.

        Raises:
            VerifierError: the row's own answer cannot be read (final), or nothing compares.
        """
        row = {**row, "kind": row.get("kind") or _kind(row)}
        if wrong := _wrong(row):
            raise VerifierError(f"{row['task_id']}: {wrong}", final=True)
        stated = await asyncio.to_thread(stated_answer, last_words(trajectory) or "", ANY_MARK)
        if stated is None:
            return Reward(0.0, {"correct": 0.0, "format": 0.0})
        correct = float(await asyncio.to_thread(self.right, row, stated))
        return Reward(correct, {"correct": correct, "format": 1.0})

    def right(self, row: Row, stated: str) -> bool:
        """Whether a stated answer is right.

        Raises:
            VerifierError: the row's own is not even equal to itself: nobody's could be.
        """
        kind, answer = row["kind"], row["answer"]
        if kind == CHOICE:
            listed = lettered.listed(row["choices"]) or []
            return lettered.chosen(stated, listed) == lettered.chosen(answer, listed)
        if kind == TEXT:
            return _folded(stated) == _folded(answer)
        gold = _gold(row) if kind == NUMERIC else None
        said = quantity(stated)
        if gold is not None and said is not None:
            relative, absolute = self._allowed(row, gold)
            return agree(gold, said, relative=relative, absolute=absolute, unit_needed=bool(row.get("unit_required")))
        if gold is not None and (gold.unit is not None and row.get("unit_required")):
            return False
        if gold is not None and _is_another(gold, stated):
            return False
        if self._equality.equal(answer, stated):
            return True
        if kind == SYMBOLIC and not self._equality.equal(answer, answer):
            raise VerifierError(f"{row['task_id']}: its answer is not equal to itself: it cannot be read", final=True)
        return False

    async def solve(self, sandbox: Sandbox, row: Row) -> str | None:
        """Say the answer."""
        return f"\\boxed{{{row['answer'].strip()}}}"

    def _allowed(self, row: Row, gold: Quantity) -> tuple[Fraction, Fraction]:
        """Relative and absolute tolerance."""
        if "tolerance" in row or "absolute" in row:
            return Fraction(str(row.get("tolerance", 0))), Fraction(str(row.get("absolute", 0)))
        return (Fraction(0) if gold.exact and gold.unit is None else self._tolerance), Fraction(0)


def _kind(row: Mapping[str, Any]) -> str:
    """What a row's answer is, by its columns, where `kind` does not say."""
    if row.get("kind"):
        return str(row["kind"])
    if row.get("choices") is not None:
        return CHOICE
    return NUMERIC if quantity(row["answer"]) is not None else SYMBOLIC


def _gold(row: Mapping[str, Any]) -> Quantity | None:
    """A numeric row's own answer in its unit."""
    gold = quantity(row["answer"])
    if gold is None or gold.unit is not None or not row.get("unit"):
        return gold
    return gold._replace(unit=units.unit(row["unit"]))


def _is_another(gold: Quantity, stated: str) -> bool:
    """Whether a statement that is no quantity is not even compared as mathematics: that rounds, and drops words."""
    if _DECIMALS.search(stated):
        return True
    plain = number(stated)
    return (plain is not None or _WORDS.search(stated) is not None) if gold.unit else plain not in (None, gold.value)


def _wrong(row: Mapping[str, Any]) -> str:
    """What keeps a row from being graded; empty where nothing does."""
    if wrong := wrong_texts(row, ("question", "answer")):
        return wrong
    if not row["answer"].strip():
        return "answer is empty"
    if row.get("kind", NUMERIC) not in KINDS:
        return f"kind {row['kind']!r} is none of {', '.join(KINDS)}"
    for name in ("tolerance", "absolute"):
        given = row.get(name, 0)
        if isinstance(given, bool) or not isinstance(given, int | float) or not (math.isfinite(given) and given >= 0):
            return f"{name} must be a number of 0 or more, got {given!r}"
    if not isinstance(row.get("unit", ""), str) or (row.get("unit") and units.unit(row["unit"]) is None):
        return f"unit {row['unit']!r} is not known"
    return _wrong_answer(row)


def _wrong_answer(row: Mapping[str, Any]) -> str:
    kind = _kind(row)
    if kind == NUMERIC and quantity(row["answer"]) is None:
        return f"answer {row['answer'][:80]!r} is no number with a unit that is known"
    if kind == CHOICE:
        listed = lettered.listed(row.get("choices"))
        if listed is None:
            return "choices must be 2 to 26 texts, in a list or by the letters from A"
        if not lettered.chosen(row["answer"], listed):
            return f"answer {row['answer'][:80]!r} names none of the {len(listed)} choices"
    if stated_answer(f"\\boxed{{{row['answer'].strip()}}}", ANY_MARK) is None:
        return "answer has braces that do not close, or is too long"
    return ""


def _folded(text: str) -> str:
    return " ".join(text.replace("\\text", " ").replace("{", " ").replace("}", " ").casefold().split()).rstrip(".")
