"""task=code in real sandboxes: from both sides, what a solution may be and do, and rows that are broken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.protocols import Sandbox
from stages.errors import RolloutError, VerifierError
from stages.protocols import Reward, Row
from stages.trajectory import Message, Trajectory
from tests.integration.sandbox.grounds import in_sandbox
from tests.support import problems
from workflows.tasks.code import SOLUTION, CodeTask

TOTALS, WORDS, SHARE = problems.rows()
GOOD = TOTALS["prompt"] + TOTALS["canonical_solution"]


@pytest.fixture
def task(tmp_path: Path) -> CodeTask:
    path = problems.write(tmp_path / "rows.jsonl", problems.rows())
    return CodeTask(path=str(path), call_s=2.0, total_s=30.0)


Grade = Callable[..., Reward]


@pytest.fixture
def grade(task: CodeTask, tmp_path: Path) -> Grade:
    """Grades a row: a solution's text, or None for none, and what was said."""

    def run(row: Row, solution: str | None, *said: str, backend: str = "bubblewrap") -> Reward:
        async def body(sandbox: Sandbox) -> Reward:
            await task.prepare(sandbox, {})
            if solution is not None:
                await sandbox.files.write(SOLUTION, solution)
            return await task.verify(sandbox, row, Trajectory([], [Message("assistant", text) for text in said]))

        return in_sandbox(backend, tmp_path, body)

    return run


@pytest.mark.parametrize("backend", ["bubblewrap", "none"])
@pytest.mark.parametrize("row", problems.rows(), ids=lambda row: row["entry_point"])
def test_the_oracles_solution_is_right_and_nothing_is_wrong(
    task: CodeTask, grade: Grade, tmp_path: Path, row: Row, backend: str
) -> None:
    async def solved(sandbox: Sandbox) -> Reward:
        assert await task.solve(sandbox, row) is None
        return await task.verify(sandbox, row, Trajectory([], []))

    assert in_sandbox(backend, tmp_path, solved) == Reward(1.0, {"correct": 1.0, "canary": 1.0, "format": 1.0})
    assert grade(row, None, "", backend=backend) == Reward(0.0, {"correct": 0.0, "canary": 1.0, "format": 0.0})


@pytest.mark.parametrize(
    "solution",
    [
        pytest.param(GOOD.partition("def running")[0] + "import random\n" + GOOD.partition("List\n")[2], id="whole"),
        pytest.param("def running" + GOOD.partition("def running")[2], id="the prompt's helper is there"),
        pytest.param("import tool\nrunning_totals = tool.totals\n", id="another file of the workspace"),
        pytest.param(GOOD + "\nprint('noise', flush=True)\nimport sys; sys.stdin.read()\n", id="noise"),
        pytest.param(GOOD.replace("-> List[int]:", "-> 'List[int]':") + "\nclass L(list): pass\n", id="annotations"),
        pytest.param(
            "class L(list): pass\nclass I(int): pass\n" + GOOD.replace("return found", "return L(I(x) for x in found)"),
            id="subclasses are taken by their values",
        ),
    ],
)
def test_what_a_right_solution_may_do(task: CodeTask, tmp_path: Path, solution: str) -> None:
    async def body(sandbox: Sandbox) -> Reward:
        await sandbox.files.write("/work/tool.py", GOOD + "totals = running_totals\n")
        await sandbox.files.write(SOLUTION, solution)
        return await task.verify(sandbox, TOTALS, Trajectory([], []))

    assert in_sandbox("bubblewrap", tmp_path, body).value == 1.0


@pytest.mark.parametrize(
    ("said", "value", "loaded"),
    [
        (f"Here:\n```python\n{GOOD}```\nDone.", 1.0, 1.0),
        (f"```\n{GOOD}\n```", 1.0, 1.0),
        (f"```python\n{GOOD}```\nNo:\n```python\npass\n```", 0.0, 1.0),
        ("```python\ndef (\n```", 0.0, 0.0),
        (GOOD, 0.0, 0.0),
    ],
)
def test_without_a_file_the_last_code_block_counts(grade: Grade, said: str, value: float, loaded: float) -> None:
    reward = grade(TOTALS, None, "```python\nold\n```", said)
    assert (reward.value, reward.parts["format"]) == (value, loaded)
    assert grade(TOTALS, "x = 1\n", said).value == 0.0, "a file counts more than what is said"


def test_endless_calls_are_wrong_in_good_time(grade: Grade) -> None:
    reward = grade(TOTALS, "def running_totals(numbers):\n    while True: pass\n")
    assert reward == Reward(0.0, {"correct": 0.0, "canary": 1.0, "format": 1.0})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"test": "def check(candidate:\n"}, "its test cannot be run: SyntaxError"),
        ({"test": "import nothing_like_this\n"}, "its test cannot be run: ModuleNotFoundError"),
        ({"test": "METADATA = {}\n"}, "its test defines no function check"),
        ({"test": "def check(candidate):\n    candidate([1])\n"}, "passes a function that returns nothing right"),
        ({"canonical_solution": "    return (\n"}, "its reference cannot be run"),
        ({"entry_point": "another"}, "its canonical_solution defines no function another"),
        ({"test": None}, "test must be a string"),
    ],
)
def test_a_row_that_cannot_be_graded_is_no_reward_at_all(grade: Grade, change: dict[str, str], said: str) -> None:
    with pytest.raises(VerifierError, match=said) as caught:
        grade({**TOTALS, **change}, GOOD)
    assert caught.value.detail["final"]


def test_an_image_without_python_is_no_reward_at_all(task: CodeTask, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> Reward:
        await sandbox.files.write(SOLUTION, GOOD)
        await sandbox.shell.run("rm -f /usr/bin/python3 /usr/local/bin/python3")
        return await task.verify(sandbox, TOTALS, Trajectory([], []))

    with pytest.raises(VerifierError, match="no Python in this image"):
        in_sandbox("bubblewrap", tmp_path, body)


def test_lines_that_are_no_rows_fail_alone(tmp_path: Path) -> None:
    path = problems.write(tmp_path / "rows.jsonl", [TOTALS, {**WORDS, "entry_point": "a b"}, {"task_id": "x"}, TOTALS])
    path.write_text(path.read_text() + "{\n" + json.dumps(SHARE) + "\n")
    task = CodeTask(path=str(path))
    rows = list(task.rows())
    assert [row["task_id"] for row in rows] == ["own/0", "line-2", "line-3", "line-4", "line-5", "own/2"]
    for row, said in zip(
        rows[1:5], ("no name of a function", "prompt is missing", "on line 1", "not JSON"), strict=True
    ):
        with pytest.raises(RolloutError, match=rf"rows\.jsonl:\d: .*{said}") as caught:
            asyncio.run(task.prepare(None, row))  # type: ignore[arg-type]
        assert caught.value.detail["final"]
    assert len({task.environment(row).setup_key for row in rows}) == 5
