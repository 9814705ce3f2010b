"""A linked pool that is missing: one that waits in the queue is waited for, one that has ended fails the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Config
from launch.slurm import pool_watch, record
from launch.slurm.client.protocol import JobInfo
from launch.slurm.client.states import JobState
from launch.slurm.pool_watch import PoolWatch
from launch.slurm.record import Submission
from stages import control
from stages.layout import RunLayout

ALL = ("init", "run", "eval")


class OneAnswer:
    """A Slurm that knows one job."""

    def __init__(self, state: JobState) -> None:
        self.state, self.asked = state, 0

    async def jobs(self, ids: list[str], **_: object) -> list[JobInfo]:
        self.asked += 1
        return [JobInfo(job_id=one, leader_id=one, state=self.state) for one in ids]


def status(*kinds: str) -> dict[str, Any]:
    """A run with open rollouts, these workers and an engine."""
    members = [{"id": f"{kind}-1-abc", "kind": kind, "leases": 0} for kind in kinds]
    return {"members": members, "fleet": [{"state": "ready"}], "rollouts": {"open": 3}}


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path)
    for directory in (layout.slurm, layout.control):
        directory.mkdir()
    one = Submission(name="n", job="run", job_id="7", placement="linked", components=["run"], submitted_at=1.0)
    record.add(layout, one)
    return layout


def watch(layout: RunLayout, slurm: OneAnswer) -> PoolWatch:
    config = dataclasses.replace(Config(run_dir=str(layout.root)), stuck_after_s=100.0)
    return PoolWatch(config, layout, slurm)  # type: ignore[arg-type]


async def looks(watch: PoolWatch, monkeypatch: pytest.MonkeyPatch, *times: tuple[float, tuple[str, ...]]) -> None:
    for now, kinds in times:
        monkeypatch.setattr(pool_watch.time, "monotonic", lambda now=now: now)
        await watch.look(status(*kinds))


async def test_a_pool_that_has_ended_fails_the_run(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = OneAnswer(JobState.CANCELLED)
    await looks(watch(layout, slurm), monkeypatch, (1000, ("init", "eval")), (1099, ("init", "eval")))
    assert slurm.asked == 0 and control.message(layout, "fail") is None
    await looks(watch(layout, slurm), monkeypatch, (1000, ("init", "eval")), (1100, ("init", "eval")))
    assert control.message(layout, "fail") == "component run will not come: its job 7 is cancelled"


async def test_a_pool_that_waits_is_waited_for_and_asked_about_rarely(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = OneAnswer(JobState.PENDING)
    times = [(1000.0 + second, ("init", "eval")) for second in range(0, 1000, 10)]
    await looks(watch(layout, slurm), monkeypatch, *times)
    assert slurm.asked == 3 and control.message(layout, "fail") is None


async def test_a_whole_run_asks_nothing(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = OneAnswer(JobState.CANCELLED)
    await looks(watch(layout, slurm), monkeypatch, (1000, ALL), (1500, ALL), (1550, ("init", "run")), (1600, ALL))
    assert slurm.asked == 0
