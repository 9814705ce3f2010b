"""task=code by the real command: cheats that score nothing, private columns that nobody sees, lines that fail alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stages.client import AsyncRolloutClient
from stages.protocols import Task
from stages.shards import ShardReader
from tests.support import problems, runs
from tests.support import swe_instance as small
from tests.support.cheats.code import HONEST, NAMES
from tests.support.routers import HandWorker, make_run, routed
from tests.support.searching import nothing_is_left_of
from workflows.tasks.code import CodeTask
from workflows.tasks.swe import SweTask

CODE = ("task=code", "task.limit=null", "sandbox=bubblewrap", "task.options.call_s=2")


def code(run_dir: Path, data: Path, *overrides: str) -> dict[str, Any]:
    """One run to its end, which must be a good one; its rows by task."""
    done = runs.run(run_dir, *CODE, f"task.path={data}", "group_size=1", *overrides, timeout_s=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {row["task_id"]: row for row in ShardReader(run_dir)}


ON_APPTAINER = [
    "forged-report", "background", "site-customize", "replaced-python", "preload", "fifo", "workspace-is-a-link",
    "search-the-host", "rewritten-tests",
]  # fmt: skip
"""Those that lean on what a backend does; all of them: `python -m tests.support.cheats graded code apptainer`."""


@pytest.mark.parametrize(("backend", "names"), [("bubblewrap", NAMES), ("apptainer", ON_APPTAINER)])
def test_every_cheat_scores_nothing_and_honest_work_scores(tmp_path: Path, backend: str, names: list[str]) -> None:
    data = problems.write(tmp_path / "rows.jsonl", problems.named([*names, HONEST]))
    agent = "agent._target_=tests.support.cheats.code.Cheat"
    graded = code(tmp_path / "run", data, agent, f"sandbox={backend}")
    assert {name: row["reward"] for name, row in graded.items()} == {**dict.fromkeys(names, 0.0), HONEST: 1.0}
    assert {row["status"] for row in graded.values()} == {"completed"}
    assert {row["grading"] for row in graded.values()} == {"trusted"}
    assert {row["infrastructure_attempts"] for row in graded.values()} == {0}, "no worker was lost, nothing ran twice"
    caught = [name for name, row in graded.items() if dict(row["reward_parts"]).get("canary") == 0.0]
    assert caught == [name for name in names if name == "answers-everything"]
    assert len(NAMES) >= 40


def test_no_private_column_is_anywhere_where_an_agent_or_its_worker_could_look(tmp_path: Path) -> None:
    data = problems.write(tmp_path / "rows.jsonl", problems.rows())
    target = "agent._target_=tests.support.searching.Searcher"
    graded = code(tmp_path / "run", data, target, f"+agent.options.words='{' '.join(problems.SECRETS)}'")
    assert len(graded) == len(problems.rows())
    nothing_is_left_of(problems.SECRETS, tmp_path / "run")


def code_task(folder: Path) -> tuple[Task, list[dict[str, Any]], tuple[str, ...]]:
    return CodeTask(path=str(problems.write(folder / "rows.jsonl", problems.rows()))), problems.rows(), problems.SECRETS


def swe_task(folder: Path) -> tuple[Task, list[dict[str, Any]], tuple[str, ...]]:
    rows = [small.row(name, hints_text=f"mind {small.SECRETS[0]}") for name in ("a", "b")]
    return SweTask(path=str(small.write(folder, rows))), rows, small.SECRETS


@pytest.mark.parametrize("made", [code_task, swe_task])
async def test_only_the_leases_of_eval_and_of_the_oracle_hold_private_columns(
    tmp_path: Path, made: Callable[[Path], tuple[Task, list[dict[str, Any]], tuple[str, ...]]]
) -> None:
    task, rows, secrets = made(tmp_path)
    for privileged in (False, True):
        layout = make_run(tmp_path / f"run-{privileged}")
        async with routed(layout, task=task, privileged=privileged) as link, AsyncRolloutClient(layout.root) as trainer:
            worker = HandWorker(link, "w-1-a")
            own = next(iter(task.rows()))["task_id"]
            await trainer.submit([{"task_id": own}, {"task_id": "sent", "data": rows[1]}])
            held = {}
            for stage in ("init", "run", "eval"):
                leases = await worker.lease(stage)
                assert leases
                held[stage] = [word for word in secrets if word.encode() in msgspec.json.encode(leases)]
                for lease in leases:
                    assert await worker.commit(lease) == "ok"
            assert held == {"init": [], "run": list(secrets) if privileged else [], "eval": list(secrets)}


def test_line_17_is_broken_and_the_others_are_graded(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in problems.named([f"row-{number}" for number in range(1, 21)])]
    lines[16] = lines[16][:-9]
    lines[18] = json.dumps({**json.loads(lines[18]), "test": "def check(candidate:\n"})
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(lines))
    code(tmp_path / "run", data, "agent=oracle", "group_size=2")
    rewards: dict[str, list[float | None]] = {}
    for line in runs.rows(tmp_path / "run"):
        rewards.setdefault(line["task_id"], []).append(line["reward"])
    good = [f"row-{number}" for number in range(1, 21) if number not in (17, 19)]
    assert rewards == {**{name: [1.0, 1.0] for name in good}, "line-17": [None, None], "row-19": [None, None]}
    failures = [json.loads(line) for line in (tmp_path / "run/failures.jsonl").read_text().splitlines()]
    said = {(one["task_id"], one["class"], one["attempts"]): one["message"] for one in failures}
    assert set(said) == {("line-17", "infrastructure", 1), ("row-19", "verifier", 1)}
    assert f"{data}:17: not JSON" in said["line-17", "infrastructure", 1]
    assert "its test cannot be run: SyntaxError" in said["row-19", "verifier", 1]
    assert not any("\n" in message or len(message) > 500 for message in said.values())
