"""task=stem: a table of graded answers, the verifier from both sides, broken rows, and the columns of data sets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.errors import RolloutError, VerifierError
from stages.protocols import Reward, Task
from stages.trajectory import Message, Trajectory
from workflows.errors import TaskDataError
from workflows.grading.choices import chosen, listed
from workflows.grading.quantities import quantity
from workflows.grading.units import unit
from workflows.tasks.rows import BROKEN
from workflows.tasks.stem import StemTask

PAIRS = Path(__file__).parent / "data" / "stem_pairs.jsonl"
MISSES: list[tuple[str, str]] = []
"""Pairs of the table that are graded otherwise than they should be; a hundredth may be."""


def opened(folder: Path, *rows: dict[str, Any], **options: Any) -> StemTask:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return StemTask(str(file), **options)


def reward(task: StemTask, row: Any, *said: str) -> Reward:
    return asyncio.run(task.verify(None, row, Trajectory([], [Message("assistant", text) for text in said])))  # type: ignore[arg-type]


def test_the_table_of_graded_answers(tmp_path: Path) -> None:
    pairs = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    columns = [{"question": "?", **{k: v for k, v in pair.items() if k not in ("stated", "right")}} for pair in pairs]
    task = opened(tmp_path, *columns)
    rows = list(task.rows())
    assert not [row[BROKEN] for row in rows if BROKEN in row]
    missed = [
        (row["answer"], pair["stated"])
        for row, pair in zip(rows, pairs, strict=True)
        if task.right(row, pair["stated"]) != pair["right"]
    ]
    assert missed == MISSES and len(MISSES) <= len(pairs) // 100
    assert len(pairs) >= 200 and min(sum(one["right"] is said for one in pairs) for said in (True, False)) >= 80


def test_verify_from_both_sides(tmp_path: Path) -> None:
    task = opened(tmp_path, {"question": "g?", "answer": "9.81 m/s^2"}, {"question": "x?", "answer": "x+1"})
    number, symbol = task.rows()
    assert isinstance(task, Task) and (number["kind"], symbol["kind"]) == ("numeric", "symbolic")
    for row in (number, symbol):
        assert reward(task, row, asyncio.run(task.solve(None, row)) or "").parts == {"correct": 1.0, "format": 1.0}  # type: ignore[arg-type]
        assert reward(task, row, "").parts == {"correct": 0.0, "format": 0.0}
        assert reward(task, row, row["answer"]).value == 0.0, "an answer is stated, or it is none"
    assert reward(task, number, "The answer is 1.", "Answer: 981 cm/s^2").value == 1.0
    assert reward(task, number, "\\boxed{9.81}", "\\boxed{1}").value == 0.0, "the last one counts"
    assert reward(task, number, "\\boxed{9.81} or \\boxed{3}").value == 0.0


def test_the_answer_is_private_and_the_choices_are_asked(tmp_path: Path) -> None:
    task = opened(tmp_path, {"question": "?", "choices": {"A": "one", "B": "two"}, "answer": "two", "solution": "2!"})
    (row,) = task.rows()
    public = {name: value for name, value in row.items() if name not in task.private}
    assert task.prompt(public) == task.prompt(row) and "solution" not in row and "answer" not in public
    assert "A) one\nB) two" in task.prompt(row)[1].content
    assert [tool["function"]["name"] for tool in task.tools(row)] == ["python"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": "1"}, "question is missing"),
        ({"question": "?", "answer": " "}, "answer is empty"),
        ({"question": "?", "answer": 1}, "answer must be a string"),
        ({"question": "?", "answer": "1", "kind": "essay"}, "kind 'essay' is none of"),
        ({"question": "?", "answer": "1", "unit": "blorp"}, "unit 'blorp' is not known"),
        ({"question": "?", "answer": "x", "kind": "numeric"}, "is no number"),
        ({"question": "?", "answer": "1", "tolerance": -1}, "tolerance must be a number"),
        ({"question": "?", "answer": "1", "absolute": True}, "absolute must be a number"),
        ({"question": "?", "answer": "C", "choices": ["a", "b"]}, "names none of the 2 choices"),
        ({"question": "?", "answer": "A", "choices": ["a"]}, "choices must be 2 to 26 texts"),
        ({"question": "?", "answer": "\\frac{1}{2"}, "braces that do not close"),
        ({"question": "?", "answer": "1", "task_id": ""}, "task_id is no text"),
    ],
)
def test_a_row_that_nobody_could_solve_fails_alone(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    task = opened(tmp_path, row, {"question": "?", "answer": "1"})
    broken, whole = task.rows()
    assert said in broken[BROKEN] and "rows.jsonl:1: " in broken[BROKEN] and BROKEN not in whole
    with pytest.raises(RolloutError, match=r"rows\.jsonl:1"):
        asyncio.run(task.prepare(None, broken))  # type: ignore[arg-type]


def test_an_answer_that_is_not_equal_to_itself_is_no_reward_at_all(tmp_path: Path) -> None:
    task = opened(tmp_path, {"question": "?", "answer": "what is this?", "kind": "symbolic"})
    (row,) = task.rows()
    with pytest.raises(VerifierError, match="not equal to itself") as caught:
        reward(task, row, "\\boxed{1}")
    assert caught.value.detail["final"]


@pytest.mark.parametrize("options", [{"columns": "mmlu"}, {"tolerance": 1.0}, {"limit": -1}])
def test_bad_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(TaskDataError, match=r"task\.(options\.)?(columns|tolerance|limit)"):
        StemTask("x", **options)


DATASETS = {
    "scp-116k": (
        {"domain": "physics", "problem": "F?", "solution": "So \\boxed{12\\,\\text{N}}.", "o1_solution": "7"},
        ("F?", "12\\,\\text{N}", "numeric"),
    ),
    "deepscaler": ({"problem": "n?", "answer": "$\\frac12$", "solution": "..."}, ("n?", "\\frac12", "symbolic")),
    "eurus-2": (
        {"data_source": "numina", "ability": "math", "extra_info": {"index": 0, "split": "train"},
         "prompt": [{"role": "system", "content": "s"},
                    {"role": "user", "content": "k?\n\nPresent the answer in LaTex format: \\boxed{Your answer}"}],
         "reward_model": {"ground_truth": "4", "style": "rule"}},
        ("k?", "4", "symbolic"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("columns", DATASETS)
@pytest.mark.parametrize("parquet", [False, True])
def test_the_columns_of_published_data_sets(tmp_path: Path, columns: str, parquet: bool) -> None:
    line, wanted = DATASETS[columns]
    bad = {**line, "problem": None, "reward_model": {"ground_truth": None, "style": "rule"}}
    if parquet:
        pq.write_table(pa.Table.from_pylist([line, bad]), tmp_path / "rows.parquet")
        task = StemTask(str(tmp_path / "rows.parquet"), columns=columns)
    else:
        task = opened(tmp_path, line, bad, columns=columns)
    row, broken = task.rows()
    assert (row["question"], row["answer"], row["kind"]) == wanted and BROKEN in broken
    assert row["task_id"] == f"{columns}-1"
    assert not set(row) & {"solution", "o1_solution", "prompt"}
    assert reward(task, row, asyncio.run(task.solve(None, row)) or "").value == 1.0  # type: ignore[arg-type]


def test_a_file_of_two_tasks_gives_each_its_own_rows(tmp_path: Path) -> None:
    line = DATASETS["eurus-2"][0]
    task = opened(tmp_path, line, {**line, "ability": "code"}, line, columns="eurus-2", limit=2)
    assert [row["task_id"] for row in task.rows()] == ["eurus-2-1", "eurus-2-3"], "their own index is 0 in every row"


def test_a_file_that_is_no_parquet_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("{}")
    with pytest.raises(TaskDataError, match=r"task\.path: .*rows\.parquet: cannot be read"):
        list(StemTask(str(tmp_path / "rows.parquet")).rows())


def test_hostile_texts_cost_no_time_and_are_nothing() -> None:
    for text in ("1" * 100_000, "(" * 5000, "m " * 200, "10^" * 100, "A, " * 300, "\\text{" * 150, "9e9999", "1/0"):
        assert quantity(text) is None
        assert chosen(text, ["a", "b"]) is None
    assert unit("m^99") is None and listed(["a", 1]) is None and listed({"B": "x", "A": "y"}) is None
