"""task=code for programs, in real sandboxes: from both sides, what a program may do, checkers, cheats, Eurus-2."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sandbox.bubblewrap import BubblewrapBackend
from sandbox.protocols import Sandbox, SandboxSpec
from stages.errors import VerifierError
from stages.protocols import Reward
from stages.trajectory import Message, Trajectory
from tests.support.cheats.programs import CHEATS, HONEST, QUESTION
from workflows.grading.outputs import same
from workflows.tasks.code import SOLUTION, CodeTask
from workflows.tasks.rows import BROKEN

_SPEC = SandboxSpec()
RIGHT = Reward(1.0, {"correct": 1.0, "passed": 1.0, "canary": 1.0, "format": 1.0})


def opened(folder: Path, *rows: dict[str, Any], **options: Any) -> CodeTask:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CodeTask(str(file), **options)


def graded(folder: Path, task: CodeTask, row: Any, *solutions: str | None) -> list[Reward]:
    """The rewards of solutions; None leaves the row's own to the oracle."""

    async def scenario() -> list[Reward]:
        found = []
        async with BubblewrapBackend(folder) as backend:
            for solution in solutions:
                async with backend.create(_SPEC) as sandbox:
                    await _write(task, sandbox, row, solution)
                    found.append(await task.verify(sandbox, row, Trajectory([], [])))
        return found

    return asyncio.run(scenario())


async def _write(task: CodeTask, sandbox: Sandbox, row: Any, solution: str | None) -> None:
    if solution is None:
        await task.solve(sandbox, row)
    else:
        await sandbox.files.write(SOLUTION, solution)


def test_honest_programs_are_paid_and_cheats_are_not(tmp_path: Path) -> None:
    task = opened(tmp_path, QUESTION, total_s=20.0)
    (row,) = task.rows()
    honest = [
        None,
        "if __name__ == '__main__':\n    " + HONEST,
        "import sys\nprint(*[sum(map(int, x.split())) for x in sys.stdin])\n",
    ]
    rewards = graded(tmp_path, task, row, *honest, *CHEATS.values())
    assert rewards[: len(honest)] == [RIGHT] * len(honest)
    assert {name: one.value for name, one in zip(CHEATS, rewards[len(honest) :], strict=True)} == dict.fromkeys(
        CHEATS, 0.0
    )
    wrong = rewards[len(honest) + list(CHEATS).index("wrong")]
    assert wrong.parts["passed"] == pytest.approx(1 / 3)


def test_what_was_said_counts_without_a_file_and_nothing_is_nothing(tmp_path: Path) -> None:
    task = opened(tmp_path, QUESTION)
    (row,) = task.rows()

    async def scenario(said: str) -> Reward:
        async with BubblewrapBackend(tmp_path) as backend, backend.create(_SPEC) as sandbox:
            return await task.verify(sandbox, row, Trajectory([], [Message("assistant", said)]))

    assert asyncio.run(scenario(f"```python\n{HONEST}```")) == RIGHT
    assert asyncio.run(scenario("")).parts["format"] == 0.0


CHECKER = """
import sys
given, expected, said = (open(path).read().split() for path in sys.argv[1:])
try:
    numbers = [int(one) for one in said]
except ValueError:
    sys.exit(2)
sys.exit(0 if len(numbers) == 2 and sum(numbers) == int(given[0]) else 1)
"""
PARTS = {
    "task_id": "parts", "question": "Print two numbers with the given sum.", "checker": CHECKER,
    "tests": [{"input": "7\n", "output": "3 4\n"}, {"input": "0\n", "output": "0 0\n"}],
}  # fmt: skip


def test_a_checker_takes_what_the_row_does_not_list_and_refuses_what_is_wrong(tmp_path: Path) -> None:
    task = opened(tmp_path, PARTS)
    (row,) = task.rows()
    good, bad, text = graded(
        tmp_path, task, row, "n = int(input())\nprint(n - 1, 1)\n", "print(3, 4)\n", "print('accept me')\n"
    )
    assert (good, bad.parts["passed"], text.value) == (RIGHT, 0.5, 0.0)


def test_an_output_that_breaks_the_checker_is_worth_nothing(tmp_path: Path) -> None:
    breaking = CHECKER.replace("try:", "if said == ['boom']:\n    sys.exit(77)\ntry:")
    task = opened(tmp_path, {**PARTS, "checker": breaking})
    (row,) = task.rows()
    (reward,) = graded(tmp_path, task, row, "n = int(input())\nprint('boom' if n else '0 0')\n")
    assert (reward.value, reward.parts["passed"]) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("checker", "said"),
    [
        ("import sys; sys.exit(0)", "accepts random text"),
        ("import sys; sys.exit(1)", "does not accept the first expected output"),
        ("import sys; sys.exit(77)", "does not accept the first expected output"),
        (CHECKER + "\n#" + "x", ""),
    ],
)
def test_a_checker_that_proves_nothing_is_no_reward_at_all(tmp_path: Path, checker: str, said: str) -> None:
    task = opened(tmp_path, {**PARTS, "checker": checker})
    (row,) = task.rows()
    if not said:
        assert graded(tmp_path, task, row, "print(int(input()), 0)\n") == [RIGHT]
        return
    with pytest.raises(VerifierError, match=said) as caught:
        graded(tmp_path, task, row, "print(3, 4)\n")
    assert caught.value.detail["final"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"question": 1}, "question is missing"),
        ({"inputs": ["1"]}, "lists of one length"),
        ({"inputs": [], "outputs": []}, "0 tests"),
        ({"outputs": ["3", "18", 4]}, "must be texts"),
        ({"time_limit_s": -1}, "time_limit_s must be"),
        ({"checker": "def ("}, "checker is no Python"),
        ({"task_id": 3}, "task_id must be a string"),
    ],
)
def test_a_row_that_is_none_says_why(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    (row,) = opened(tmp_path, {**QUESTION, **change}).rows()
    assert said in row[BROKEN]


def test_tests_are_private_and_unknown_columns_go(tmp_path: Path) -> None:
    task = opened(tmp_path, {**QUESTION, "gold": HONEST, "checker": CHECKER})
    (row,) = task.rows()
    public = {name: value for name, value in row.items() if name not in task.private}
    assert set(public) == {"task_id", "question", "time_limit_s", "memory_mib"}
    assert task.prompt(public) == task.prompt(row) and "256 MiB" in task.prompt(row)[1].content


def test_rows_of_eurus_2(tmp_path: Path) -> None:
    tests = {"inputs": ["0.5\n"], "outputs": ["0.25000001\n"]}
    told = "Square it.\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end"  # noqa: E501
    line = {
        "data_source": "taco", "ability": "code", "prompt": [{"role": "user", "content": told}],
        "reward_model": {"ground_truth": json.dumps(tests), "style": "rule"}, "extra_info": {"index": 3},
    }  # fmt: skip
    called = {**line, "extra_info": {}, "reward_model": {"ground_truth": json.dumps({**tests, "fn_name": "f"})}}
    task = opened(tmp_path, line, called, {**line, "ability": "math"}, columns="eurus-2")
    row, function = task.rows()
    assert (row["task_id"], row["question"]) == ("eurus-2-1", "Square it.")
    assert "fn_name 'f'" in function[BROKEN]
    assert [one.value for one in graded(tmp_path, task, row, "print(float(input()) ** 2)\n", "print(0.26)\n")] == [1, 0]


@pytest.mark.parametrize(
    ("expected", "printed", "relative", "equal"),
    [
        ("1 2\n", "1\n2", 0, True), ("1 2", "1 2 3", 0, False), ("Yes", "yes", 0, False), ("0.5", "0.50", 0, False),
        ("0.5", "0.500001", 1e-5, True), ("0.5", "0.51", 1e-5, False), ("100000001", "100000002", 1e-5, False),
        ("1e3", "1000", 1e-5, True), ("1.5", "nan", 1e-5, False), ("1.5", "inf", 1, False), ("", "", 0, True),
    ],
)  # fmt: skip
def test_when_outputs_are_the_same(expected: str, printed: str, relative: float, equal: bool) -> None:
    assert same(expected, printed, relative) is equal
