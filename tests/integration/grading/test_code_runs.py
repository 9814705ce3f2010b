"""task=code by the real command: cheats that score nothing, private columns that nobody sees, lines that fail alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stages.client import AsyncRolloutClient
from stages.shards import ShardReader
from tests.support import problems, runs
from tests.support.cheats.code import HONEST, NAMES
from tests.support.routers import HandWorker, make_run, routed
from workflows.tasks.code import CodeTask

CODE = ("task=code", "task.limit=null", "sandbox=bubblewrap", "task.options.call_s=2")


def code(run_dir: Path, data: Path, *overrides: str) -> dict[str, dict[str, Any]]:
    """One run to its end, which must be a good one; its rows by task."""
    done = runs.run(run_dir, *CODE, f"task.path={data}", "group_size=1", *overrides, timeout_s=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {row["task_id"]: row for row in ShardReader(run_dir)}


@pytest.mark.timeout(300)
def test_every_cheat_scores_nothing_and_honest_work_scores(tmp_path: Path) -> None:
    data = problems.write(tmp_path / "rows.jsonl", problems.named([*NAMES, HONEST]))
    graded = code(tmp_path / "run", data, "agent._target_=tests.support.cheats.code.Cheat")
    assert {name: row["reward"] for name, row in graded.items()} == {**dict.fromkeys(NAMES, 0.0), HONEST: 1.0}
    assert {row["status"] for row in graded.values()} == {"completed"}
    assert {row["grading"] for row in graded.values()} == {"trusted"}
    assert {row["infrastructure_attempts"] for row in graded.values()} == {0}, "no worker was lost, nothing ran twice"
    caught = [name for name, row in graded.items() if dict(row["reward_parts"]).get("canary") == 0.0]
    assert caught == ["answers-everything"]
    assert len(NAMES) >= 40


@pytest.mark.timeout(300)
def test_no_private_column_is_anywhere_where_an_agent_or_its_worker_could_look(tmp_path: Path) -> None:
    data = problems.write(tmp_path / "rows.jsonl", problems.rows())
    target = "agent._target_=tests.support.searching.Searcher"
    graded = code(tmp_path / "run", data, target, f"+agent.options.words='{' '.join(problems.SECRETS)}'")
    assert len(graded) == len(problems.rows())
    for row in graded.values():
        (said,) = [message for message in json.loads(row["messages"]) if message["role"] == "assistant"]
        assert json.loads(said["content"]) == []
        assert not any(word in row["messages"] for word in problems.SECRETS)
    for segment in (tmp_path / "run/handoff").glob("*"):
        assert not any(word.encode() in segment.read_bytes() for word in problems.SECRETS)
    logs = [path.read_text() for path in (tmp_path / "run/logs").rglob("*") if path.is_file()]
    assert logs and not any(word in text for word in problems.SECRETS for text in logs)


async def test_only_the_leases_of_eval_and_of_the_oracle_hold_private_columns(tmp_path: Path) -> None:
    task = CodeTask(path=str(problems.write(tmp_path / "rows.jsonl", problems.rows())))
    for privileged in (False, True):
        layout = make_run(tmp_path / f"run-{privileged}")
        async with routed(layout, task=task, privileged=privileged) as link, AsyncRolloutClient(layout.root) as trainer:
            worker = HandWorker(link, "w-1-a")
            await trainer.submit([{"task_id": "own/0"}, {"task_id": "sent", "data": problems.rows()[1]}])
            held = {}
            for stage in ("init", "run", "eval"):
                leases = await worker.lease(stage)
                held[stage] = [word for word in problems.SECRETS if word.encode() in msgspec.json.encode(leases)]
                for lease in leases:
                    assert await worker.commit(lease) == "ok"
            both = list(problems.SECRETS)
            assert held == {"init": [], "run": both if privileged else [], "eval": both}


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
