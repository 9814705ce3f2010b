"""task=arith: equal seeds, disjoint splits, given rows, and the verifier from both sides."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import RolloutError
from stages.protocols import Task
from stages.trajectory import Message, Trajectory
from tests.support.sandboxes import DirectorySandbox
from workflows.errors import TaskDataError
from workflows.tasks import sums
from workflows.tasks.arith import ArithTask


def expression(row) -> str:
    return sums.expression_of(row["question"], row.get("files", {}).get(sums.NUMBERS_PATH, ""))


def verify(task: ArithTask, row, *said: str):
    messages = [*task.prompt(row), *(Message("assistant", text) for text in said)]
    return asyncio.run(task.verify(None, row, Trajectory([], messages)))


def test_is_a_task():
    assert isinstance(ArithTask(), Task)


def test_equal_seeds_give_equal_rows_and_others_do_not():
    first, again, other = (list(ArithTask(seed=seed, limit=50).rows()) for seed in (3, 3, 4))
    assert first == again
    assert [row["question"] for row in first] != [row["question"] for row in other]
    assert len({row["task_id"] for row in first}) == 50


def test_a_larger_limit_only_adds_rows():
    assert list(ArithTask(limit=100).rows())[:10] == list(ArithTask(limit=10).rows())


def test_splits_share_no_expression():
    train, heldout = (
        {expression(row) for seed in range(20) for row in ArithTask(seed, 200, split=split).rows()}
        for split in ("train", "heldout")
    )
    assert len(train) > 2000 and len(heldout) > 2000
    assert not train & heldout


def test_answers_are_pythons_and_the_file_share_is_kept():
    rows = list(ArithTask(limit=2000, file_fraction=0.33).rows())
    for row in rows:
        assert eval(expression(row)) == row["answer"]
    assert 0.28 < sum("files" in row for row in rows) / len(rows) < 0.38
    assert not any("files" in row for row in ArithTask(limit=200, file_fraction=0).rows())
    assert all("files" in row for row in ArithTask(limit=200, file_fraction=1).rows())


@given(st.lists(st.integers(0, 99), min_size=1, max_size=6), st.data())
def test_value_of_is_pythons(numbers, data):
    operators = data.draw(st.lists(st.sampled_from("+-*"), min_size=len(numbers) - 1, max_size=len(numbers) - 1))
    text = sums.join([str(number) for number in numbers], operators)
    assert sums.value_of(text) == eval(text)


@pytest.mark.parametrize("text", ["", "+", "1+", "2**3", "1/2", "(1)", "1 + 2", "²"])
def test_value_of_refuses_what_is_no_sum(text):
    with pytest.raises(ValueError):
        sums.value_of(text)


def test_a_question_never_shows_what_is_in_its_file():
    for row in ArithTask(limit=300, file_fraction=1).rows():
        names = [line.split("=")[0] for line in row["files"][sums.NUMBERS_PATH].split()]
        assert names and all(f"{name} " in row["question"] for name in names)
        assert sums.NUMBERS in row["question"]


def test_rows_without_files_share_one_environment_and_others_are_named_by_content():
    task = ArithTask(limit=300)
    plain = {task.environment(row).setup_key for row in task.rows() if "files" not in row}
    filed = {
        json.dumps(row["files"]): task.environment(row).setup_key for row in task.rows() if "files" in row
    }  # fmt: skip
    assert len(plain) == 1
    assert len(set(filed.values())) == len(filed) > 50
    assert not plain & set(filed.values())
    row = next(iter(task.rows()))
    assert task.environment(row).workspace == ("/work",) and task.environment(row).image == "host"
    assert task.environment({k: v for k, v in row.items() if k != "answer"}) == task.environment(row)


def test_the_prompt_needs_no_private_column():
    task = ArithTask(limit=20)
    for row in task.rows():
        public = {key: value for key, value in row.items() if key not in task.private}
        assert task.prompt(public) == task.prompt(row)
        assert task.tools(public) == task.tools(row)


def test_verify_says_one_for_the_answer_and_nothing_else():
    task = ArithTask()
    row = {"task_id": "t", "question": "4 - 19 = ?", "answer": -15}
    assert verify(task, row, "The answer is -15.").value == 1.0
    assert verify(task, row, "The answer is -15.").parts == {"correct": 1.0, "format": 1.0}
    assert verify(task, row, "Thinking. The answer is -15.").value == 1.0
    for wrong in ("The answer is 15.", "The answer is -150.", "-15", "", "The answer is -15. The answer is 3."):
        assert verify(task, row, wrong).value == 0.0, wrong
    assert verify(task, row, "The answer is 15.").parts == {"correct": 0.0, "format": 1.0}
    assert verify(task, row, "-15").parts == {"correct": 0.0, "format": 0.0}
    assert verify(task, row).value == 0.0
    assert verify(task, row, "The answer is -15.", "I am not sure.").value == 0.0
    assert verify(task, row, f"The answer is {'9' * 5000}.").value == 0.0


def test_prepare_then_solve_earns_the_reward(tmp_path: Path):
    task = ArithTask(limit=6, file_fraction=0.5)
    rows = list(task.rows())
    assert {"files" in row for row in rows} == {True, False}
    for number, row in enumerate(rows):
        (tmp_path / str(number)).mkdir()
        sandbox = DirectorySandbox(tmp_path / str(number))

        async def solved(sandbox=sandbox, row=row) -> str | None:
            await task.prepare(sandbox, row)
            return await task.solve(sandbox, row)

        assert verify(task, row, asyncio.run(solved())).value == 1.0


def test_given_rows(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    rows = [{"task_id": f"t{n}", "question": f"{n} + 1 = ?", "answer": n + 1} for n in range(70)]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    assert list(ArithTask(path=str(path)).rows()) == rows
    assert len(list(ArithTask(limit=None).rows())) == 64
    assert list(ArithTask(path=str(path), limit=2).rows()) == rows[:2]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object"),
        ('{"task_id": "a", "question": "1 = ?"}', "answer must be an integer"),
        ('{"task_id": "a", "question": "1 = ?", "answer": true}', "answer must be an integer"),
        ('{"task_id": 1, "question": "1 = ?", "answer": 1}', "task_id must be a string"),
        ('{"task_id": "", "question": "1 = ?", "answer": 1}', "task_id is empty"),
        ('{"task_id": "ok", "question": "1 = ?", "answer": 1}', "stands on line 1 already"),
        ('{"task_id": "a", "question": "x = ?", "answer": 1, "files": {"/etc/x": ""}}', "not under /work/"),
        ('{"task_id": "a", "question": "x = ?", "answer": 1, "files": {"/work/../etc/x": ""}}', "not under /work/"),
        ('{"task_id": "a", "question": "x = ?", "answer": 1, "files": {"/work/x": 1}}', "paths to texts"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, line: str, said: str):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"task_id": "ok", "question": "1 = ?", "answer": 1}\n' + line + "\n")
    task = ArithTask(path=str(path))
    whole, broken = task.rows()
    assert (whole["task_id"], broken["task_id"]) == ("ok", "line-2")
    assert task.environment(broken).setup_key not in {task.environment(whole).setup_key, ""}
    with pytest.raises(RolloutError, match=r"rows\.jsonl:2: ") as caught:
        asyncio.run(task.prepare(None, broken))
    assert said in str(caught.value) and caught.value.detail["final"]


@pytest.mark.parametrize(
    "options",
    [{"split": "test"}, {"file_fraction": 1.5}, {"limit": -1}],
)
def test_bad_options_are_refused_by_name(options):
    with pytest.raises(TaskDataError, match=next(iter(options))):
        ArithTask(**options)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(TaskDataError, match=r"gone\.jsonl"):
        list(ArithTask(path=str(tmp_path / "gone.jsonl")).rows())


def test_generator_has_no_end():
    assert len(list(itertools.islice(sums.generate(0, "heldout", 0.5), 5000))) == 5000
