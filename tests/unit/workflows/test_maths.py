"""task=math: which answer a text states, when two answers are equal, and the verifier from both sides."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.errors import RolloutError, VerifierError
from stages.protocols import Reward, Task
from stages.trajectory import Message, Trajectory
from workflows.errors import TaskDataError
from workflows.grading.equality import LONGEST, Equality
from workflows.grading.stated import stated_answer
from workflows.tasks.maths import MathTask, gold_answer

ROW = {"question": "How many legs have nine dogs and a bird with -1 leg missing?", "answer": "9*4=36\n#### 1,036"}


@pytest.fixture(scope="module")
def equality() -> Iterator[Equality]:
    made = Equality()
    yield made
    made.close()


@pytest.fixture
def task(tmp_path: Path) -> MathTask:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    return MathTask(path=str(path))


def reward(task: MathTask, row, *said: str) -> Reward:
    return asyncio.run(task.verify(None, row, Trajectory([], [Message("assistant", text) for text in said])))


def test_is_a_task(task: MathTask) -> None:
    assert isinstance(task, Task)


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("The answer is 18.", "18"), ("the final answer is: 18", "18"), ("So **The answer is $18**.", "18"),
        ("The answer is 3.5. Really.", "3.5"), ("#### 70,000", "70,000"), (r"So \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("The answer is 1. The answer is 2.", "2"), (r"\boxed{1} but the answer is 2.", "2"),
        (r"The answer is 2. \boxed{1}", "1"), (r"The answer is $\boxed{7}$.", "7"), ("18", None), ("", None),
        ("The answer is .", None), (r"\boxed{1", None), ("#### ", None), (r"\boxed{}", None),
        ("The answer is\n18", None), ("answer is 5", None),
    ],
)  # fmt: skip
def test_the_last_stated_answer(text: str, stated: str | None) -> None:
    assert stated_answer(text) == stated


@pytest.mark.parametrize("text", ["the answer is ", "#", "\\boxed{", "the answer is {", ". ", "the answer is 1\t"])
def test_a_message_that_was_made_to_take_long_does_not(text: str) -> None:
    began = time.process_time()
    stated_answer(text * 50_000)
    assert time.process_time() - began < 1
    assert stated_answer(text * 50_000 + "\nThe answer is 5.") == "5"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("18", "18"), ("18", "18.00"), ("70000", "70,000"), ("-3", "-3"), ("0.5", r"\frac{1}{2}"), ("0.5", "1/2"),
        ("5", "10/2"), ("5", r"\$5"), ("5", "5 dollars"), ("5", r"5\text{ dollars}"), ("1000000", "10^6"),
        (".5", "0.5"), ("2", r"\sqrt{4}"), ("5 dollars", "5 dollar"), ("0.00000012", r"12 \times 10^{-8}"),
    ],
)  # fmt: skip
def test_equal_values_in_other_letters(equality: Equality, gold: str, answer: str) -> None:
    assert equality.equal(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("18", "19"), ("18", "18.0000001"), ("5", "5 or 6"), ("5", "5*="), ("20", "20*12*12*1-0*12"), ("5", "5, 6"),
        ("5", "x"), ("5", "5 million"), ("5", "1,2"), ("5", ""), ("5", "}{"), ("5", "\\"), ("5", "5" * (LONGEST + 1)),
        ("5", "\N{ARABIC-INDIC DIGIT FIVE}"), ("70000", "7,0,000"), ("0.00000012", "0.0+0"), ("5 km", "5 bananas"),
    ],
)  # fmt: skip
def test_other_values_and_no_values_are_different(equality: Equality, gold: str, answer: str) -> None:
    assert not equality.equal(gold, answer)


def test_an_answer_that_never_ends_is_different_and_the_next_is_still_compared(equality: Equality) -> None:
    assert not equality.equal("5", "10^{10^{10^{10}}}")
    assert equality.equal("5", r"\frac{10}{2}")


def test_verify_from_both_sides(task: MathTask) -> None:
    (row,) = task.rows()
    assert row["task_id"] == "math-1" and gold_answer(row["answer"]) == "1,036"
    assert reward(task, row, asyncio.run(task.solve(None, row))).parts == {"correct": 1.0, "format": 1.0}
    assert reward(task, row, "The answer is 36.").parts == {"correct": 0.0, "format": 1.0}
    assert reward(task, row, "1036").parts == {"correct": 0.0, "format": 0.0}
    assert reward(task, row, "The answer is 1036.", "I am not sure.").value == 0.0
    assert reward(task, row).value == 0.0
    with pytest.raises(VerifierError, match="answer is missing") as caught:
        reward(task, {"task_id": "math-1", "question": "?"}, "The answer is 1.")
    assert caught.value.detail["final"]


def test_the_answer_is_private_and_rows_share_an_environment(task: MathTask) -> None:
    (row,) = task.rows()
    public = {name: value for name, value in row.items() if name not in task.private}
    assert task.prompt(public) == task.prompt(row) and "1,036" not in json.dumps(public)
    assert task.environment(public) == task.environment(row) == task.environment({"task_id": "other"})


def test_a_line_that_is_no_row_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(ROW), '{"question": "x"', json.dumps({"question": "?"}), json.dumps({**ROW, "answer": "#### "})]
    path.write_bytes("\n".join(lines).encode() + b'\n"\xff"\n' + json.dumps(ROW).encode())
    task = MathTask(path=str(path))
    rows = list(task.rows())
    assert [row["task_id"] for row in rows] == ["math-1", "line-2", "line-3", "line-4", "line-5", "math-6"]
    for row, said in zip(rows[1:5], ("not JSON", "answer is missing", "without a value", "not UTF-8"), strict=True):
        with pytest.raises(RolloutError, match=said) as caught:
            asyncio.run(task.prepare(None, row))
        assert caught.value.detail["final"]
    assert len({task.environment(row).setup_key for row in rows}) == 5


@pytest.mark.parametrize("options", [{}, {"path": "x", "limit": -1}])
def test_bad_options_are_refused_by_name(options) -> None:
    with pytest.raises(TaskDataError, match=r"task\.(path|limit)"):
        MathTask(**options)
