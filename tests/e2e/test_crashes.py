"""Whole processes of a real run killed at the n-th call of a kind that they make to the shared filesystem."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import runs

PLANS = [
    "init:open:1", "init:write:2", "init:rename:1", "init:fsync:4", "run:open:1", "run:write:3", "run:fsync:5",
    "eval:open:1", "eval:write:2", "eval:fsync:3", "replica:open:0", "replica:rename:0",
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_a_process_killed_at_any_call_costs_nothing(tmp_path: Path, plan: str) -> None:
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.support.crashing_run", plan, "experiment=demo", f"run_dir={run_dir}",
         "task.limit=3", "group_size=2"],
        cwd=runs.REPOSITORY, env={**os.environ, "PYTHONPATH": str(runs.REPOSITORY)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs.exactly_once(run_dir, 6)
    assert {row["status"] for row in runs.rows(run_dir)} == {"completed"}
    kind = plan.partition(":")[0]
    assert f"{kind}-1 ended with signal 9" in done.stderr, "the plan was never reached"


def test_clocks_that_are_thirty_seconds_apart_cost_nothing(tmp_path: Path) -> None:
    """Leases run by the router's clock alone: with a ttl far below the skew, none may expire."""
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [
            sys.executable, "-P", "-m", "tests.support.skewed_run", "experiment=demo", f"run_dir={run_dir}",
            "task.limit=6", "group_size=2", "lease.ttl_s=5", "lease.heartbeat_s=1",
        ],
        cwd=runs.REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(runs.REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs.exactly_once(run_dir, 12)
    counts = runs.replayed(run_dir).state.counts
    assert (counts.completed, counts.retries, counts.infra_failures) == (12, 0, 0)
