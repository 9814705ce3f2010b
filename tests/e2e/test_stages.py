"""Stages do not hold each other up, and one broken rollout breaks nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stages.journal.history import read_events
from stages.layout import RunLayout
from stages.ledger.events import Committed
from tests.support import runs
from tests.support.tasks import BROKEN

OWN = "task._target_=tests.support.tasks"


def test_a_slow_eval_leaves_run_no_idle_slot(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = runs.run(run_dir, f"{OWN}.SlowGrading", "task.limit=32", "+task.options.slow_s=20.0", "pools.run.slots=16")
    assert result.returncode == 0, result.stderr
    runs.exactly_once(run_dir, 128)
    idle = runs.idle_slots(run_dir, "run", 16)
    # What is left is the time that a free slot's question is on its way; slots that wait for grading have nine tenths.
    assert idle.idle_s <= 0.3 * idle.offered_s, idle
    commits = [event for event in read_events(RunLayout(run_dir)) if isinstance(event, Committed)]
    last_run = max(event.t for event in commits if event.member.startswith("run-"))
    last_eval = max(event.t for event in commits if event.member.startswith("eval-"))
    assert last_eval - last_run > 15, "grading was to be the slow part"


def test_exceptions_in_three_of_64_rollouts_are_recorded_and_the_others_finish(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = runs.run(run_dir, f"{OWN}.Breaking", "task.limit=64", "group_size=1")
    assert result.returncode == 0, result.stderr
    runs.exactly_once(run_dir, 64)
    odd = {row["task_id"]: row for row in runs.rows(run_dir) if row["failure_class"] is not None}
    prepare, prompt, verify = (f"arith-0-{BROKEN[where]}" for where in ("prepare", "prompt", "verify"))
    assert {name: (row["status"], row["failure_class"]) for name, row in odd.items()} == {
        prepare: ("failed", "infrastructure"), prompt: ("completed", "agent"), verify: ("failed", "verifier"),
    }  # fmt: skip
    for name in (prepare, verify):
        assert odd[name]["reward"] is None and odd[name]["mask_sample"] is True and odd[name]["shard"] is None
    assert odd[prompt]["reward"] == 0.0
    failures = [json.loads(line) for line in (run_dir / "failures.jsonl").read_text().splitlines()]
    assert {f["task_id"]: (f["class"], "broken on purpose in" in f["message"], f["attempts"]) for f in failures} == {
        prepare: ("infrastructure", True, 3), verify: ("verifier", True, 3),
    }  # fmt: skip


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_the_verifier_is_proven_from_both_sides(tmp_path: Path, agent: str, reward: float) -> None:
    run_dir = tmp_path / "run"
    result = runs.run(run_dir, f"agent={agent}", "task.limit=16", "group_size=1")
    assert result.returncode == 0, result.stderr
    assert [row["reward"] for row in runs.rows(run_dir)] == [reward] * 16
