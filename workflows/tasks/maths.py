"""task=math: word problems with a numeric answer (GSM8K columns); equality by value, not by letters."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from sandbox.protocols import Sandbox
from stages.errors import VerifierError
from stages.protocols import Reward, Row
from stages.trajectory import Message, Trajectory
from workflows.grading.equality import Equality
from workflows.grading.stated import stated_answer
from workflows.tasks.lines import LinesTask, last_words
from workflows.tasks.rows import wrong_texts

_SYSTEM: Final = (
    "You solve word problems. You have a shell for calculations. When you are done, end with one line: The answer is N."
)


class MathTask(LinesTask):
    r"""Questions whose answer is a number; the one that the last assistant message states last counts.

    An answer is stated as `The answer is N.`, as `#### N` or as `\boxed{N}`. The reward is 1.0 where it equals the
    row's, else 0.0; its parts: `correct`, and `format` (an answer was stated).

    Args:
        path: JSONL with question and answer (all of it, or what follows its last ####); task_id where rows have one.
        limit: number of rows; None is all.

    Raises:
        TaskDataError: an option is out of range.
    """

    name = "math"
    columns = "GSM8K's columns"
    private = frozenset({"answer"})

    def __init__(self, path: str | None = None, limit: int | None = None) -> None:
        super().__init__(path, limit)
        self._equality = Equality()

    def checked(self, row: dict[str, Any], number: int) -> dict[str, Any] | str:
        """Question and answer are texts; a row without a task_id is named after its line."""
        row = {"task_id": f"math-{number}", **row}
        wrong = wrong_texts(row, ("task_id", "question", "answer"))
        if wrong or not row["task_id"]:
            return wrong or "task_id is empty"
        return row if gold_answer(row["answer"]) else "answer ends without a value"

    def prompt(self, row: Row) -> list[Message]:
        """The question."""
        return [Message("system", _SYSTEM), Message("user", row["question"])]

    async def verify(self, sandbox: Sandbox, row: Row, trajectory: Trajectory) -> Reward:
        """Compare what the last assistant message states last; the sandbox is not looked at.

        Raises:
            VerifierError: the row has no answer (final), or nothing compares.
        """
        wrong = wrong_texts(row, ("answer",))
        if wrong:
            raise VerifierError(f"{row['task_id']}: {wrong}", final=True)
        stated = await asyncio.to_thread(stated_answer, last_words(trajectory) or "")
        if stated is None:
            return Reward(0.0, {"correct": 0.0, "format": 0.0})
        correct = await asyncio.to_thread(self._equality.equal, gold_answer(row["answer"]), stated)
        return Reward(float(correct), {"correct": float(correct), "format": 1.0})

    async def solve(self, sandbox: Sandbox, row: Row) -> str | None:
        """Say the answer."""
        return f"The answer is {gold_answer(row['answer'])}."


def gold_answer(answer: str) -> str:
    """What follows the last #### of a row's answer, or all of it."""
    return answer.rpartition("####")[2].strip()
