"""task=code in real sandboxes: from both sides, what a solution may be and do, and rows that are broken."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.protocols import Sandbox
from stages.errors import RolloutError, VerifierError
from stages.protocols import Reward, Row
from stages.trajectory import Message, Trajectory
from tests.integration.sandbox.grounds import in_sandbox
from tests.support import problems
from tests.support.cheats.code import INSIDERS, SOLUTIONS
from workflows.grading import trusted
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
        ({"test": "import sys\nsys.exit(0)\n"}, "its test cannot be run: SystemExit: 0"),
        ({"test": "import sys\ndef check(candidate):\n    sys.exit(0)\n"}, "its test ends the process"),
        ({"canonical_solution": "    return [1]\n"}, "its test refuses its canonical_solution .*: AssertionError"),
    ],
)
def test_a_row_that_cannot_be_graded_is_no_reward_at_all(grade: Grade, change: dict[str, str], said: str) -> None:
    with pytest.raises(VerifierError, match=said) as caught:
        grade({**TOTALS, **change}, GOOD)
    assert caught.value.detail["final"]


HEAD = "def f(n):\n"
BY_VALUE = {
    "range": (HEAD, "return range(n)", "assert c(3) == range(3) and list(c(3)) == [0, 1, 2]"),
    "generator": (HEAD, "yield from range(n)", "it = c(3)\n    assert next(it) == 0 and list(it) == [1, 2]"),
    "iterator as argument": (HEAD, "return sum(n)", "assert c(iter([1, 2])) == 3"),
    "a million numbers": (HEAD, "return list(range(n))", "assert len(c(10 ** 6)) == 10 ** 6"),
    "many digits": (HEAD, "return 10 ** n", "assert c(5000) == 10 ** 5000"),
    "recursion": (HEAD, "return 0 if n == 0 else 1 + f(n - 1)", "assert c(900) == 900"),
    "a test that leaves something": (HEAD, "return n", "assert c(3) == 3 and not seen\n    seen.append(1)"),
}
BY_IDENTITY = {
    "in place": (HEAD, "n.sort()", "x = [2, 1]\n    c(x)\n    assert x == [1, 2]"),
    "coroutine": ("async def f(n):\n", "return n", "import asyncio\n    assert asyncio.run(c(3)) == 3"),
    "function as argument": (HEAD, "return n(1)", "assert c(lambda x: x + 1) == 2"),
    "fraction": ("from fractions import Fraction\n" + HEAD, "return Fraction(n)", "assert c(1) == Fraction(1)"),
    "exception of its own": (
        "class E(Exception): pass\n" + HEAD, "raise E", "try: c(1)\n    except E: return\n    assert 0",
    ),
    "endless iterator": ("import itertools\n" + HEAD, "return itertools.count(n)", "assert next(c(3)) == 3"),
}  # fmt: skip


def by_value(prompt: str, body: str, test: str) -> dict[str, str]:
    check = f"seen = []\ndef check(c):\n    {test}\n"
    return {"task_id": "t", "prompt": prompt, "entry_point": "f", "canonical_solution": f"    {body}\n", "test": check}


@pytest.mark.parametrize("name", BY_VALUE)
def test_what_passes_by_value_is_graded(grade: Grade, name: str) -> None:
    row = by_value(*BY_VALUE[name])
    assert grade(row, row["prompt"] + row["canonical_solution"]).value == 1.0
    assert grade(row, row["prompt"] + "    return None\n").value == 0.0


@pytest.mark.parametrize("name", BY_IDENTITY)
def test_a_row_whose_own_solution_cannot_pass_is_no_reward_at_all(grade: Grade, name: str) -> None:
    row = by_value(*BY_IDENTITY[name])
    with pytest.raises(VerifierError, match="refuses its canonical_solution where arguments and results") as caught:
        grade(row, row["prompt"] + row["canonical_solution"])
    assert caught.value.detail["final"] and "\n" not in str(caught.value)


def test_a_message_that_was_made_to_take_long_does_not(grade: Grade) -> None:
    began = time.process_time()
    assert grade(TOTALS, None, "```" + " " * 200_000 + "```python " * 20_000).value == 0.0
    assert time.process_time() - began < 10


HIDING = ("if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) or libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0):", "if False:")
INHERITED = (
    ("os.dup(_REPORT_FD)", "os.dup2(_REPORT_FD, 9)"),
    ("pass_fds=(take, give)", "pass_fds=(take, give, 9)"),
)


@pytest.mark.parametrize(
    ("name", "holes"),
    [
        ("prying", [HIDING]), ("forged-report", [HIDING]), ("background", [HIDING]),
        ("forged-report", INHERITED), ("background", INHERITED),
    ],
)  # fmt: skip
def test_a_cheat_is_paid_where_what_it_runs_against_is_missing(
    grade: Grade, monkeypatch: pytest.MonkeyPatch, name: str, holes: list[tuple[str, str]]
) -> None:
    whole, left = trusted.source, {hole for hole, _ in holes}

    def source(module: str) -> str:
        text = whole(module)
        for hole, filled in holes:
            left.difference_update({hole} if hole in text else ())
            text = text.replace(hole, filled)
        return text

    assert grade(TOTALS, SOLUTIONS[name]).value == 0.0
    monkeypatch.setattr(trusted, "source", source)
    assert grade(TOTALS, SOLUTIONS[name]).value == 1.0
    assert not left, "no such text in what is sent"


@pytest.mark.parametrize("name", INSIDERS)
def test_an_insider_is_paid_where_the_text_that_it_was_written_against_is_another(
    grade: Grade, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole, (there, instead) = trusted.source, INSIDERS[name]
    assert any(there in whole(module) for module in ("workflows.grading.values", "workflows.grading.functions"))
    assert grade(TOTALS, SOLUTIONS[name]).value == 0.0
    monkeypatch.setattr(trusted, "source", lambda module: whole(module).replace(there, instead))
    assert grade(TOTALS, SOLUTIONS[name]).value == 1.0


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
