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
from launch.slurm.shapes import Job
from stages import control
from stages.layout import RunLayout

ALL = ("init", "run", "eval")


class OneAnswer:
    """A Slurm that knows one job."""

    def __init__(self, state: JobState, started_at: int | None = None) -> None:
        self.state, self.asked, self.started_at, self.node_count = state, 0, started_at, 0

    async def jobs(self, ids: list[str], **_: object) -> list[JobInfo]:
        self.asked += 1
        return [
            JobInfo(job_id=one, leader_id=one, state=self.state, started_at=self.started_at, node_count=self.node_count)
            for one in ids
        ]


def status(*kinds: str) -> dict[str, Any]:
    """A run with open rollouts, these workers and an engine."""
    members = [{"id": f"{kind}-1-abc", "kind": kind, "leases": 0} for kind in kinds]
    return {"members": members, "fleet": [{"id": "replica-1-abc", "state": "ready"}], "rollouts": {"open": 3}}


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


async def test_a_fleet_of_which_a_replica_serves_is_not_missed(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fleet's own job has ended; an engine that was started beside it goes on."""
    one = Submission(name="f", job="fleet", job_id="8", placement="linked", components=["fleet"], submitted_at=1.0)
    record.add(layout, one)
    fleets = {"other-1-abc": None, "": "component fleet will not come: its job 8 is cancelled"}
    for name, message in fleets.items():
        watching = watch(layout, OneAnswer(JobState.CANCELLED))
        for now in (1000, 1400):
            monkeypatch.setattr(pool_watch.time, "monotonic", lambda now=now: now)
            await watching.look(status(*ALL) | {"fleet": [{"id": name, "state": "ready"}] if name else []})
        assert control.message(layout, "fail") == message


# ---- a job of several nodes that has lost the one with its batch shell


class Lost:
    """A linked RUN job of two nodes, 7, that Slurm calls running although nothing of it is heard."""

    def __init__(self, layout: RunLayout, monkeypatch: pytest.MonkeyPatch, nodes: int = 2, most: int = 3) -> None:
        config = Config(run_dir=str(layout.root))
        pools = dataclasses.replace(config.pools, run=dataclasses.replace(config.pools.run, nodes=nodes))
        cluster = dataclasses.replace(config.cluster, max_requeues=most)
        lease = dataclasses.replace(config.lease, ttl_s=10.0)
        self.config = dataclasses.replace(config, pools=pools, lease=lease, cluster=cluster, stuck_after_s=100.0)
        self.slurm, self.monkeypatch = OneAnswer(JobState.RUNNING, started_at=10), monkeypatch
        self.told: list[tuple[str, ...]] = []
        self.broken = 0
        self.slurm.cancel = self.cancel  # type: ignore[attr-defined]
        self.watch = PoolWatch(self.config, layout, self.slurm)  # type: ignore[arg-type]
        monkeypatch.setattr(pool_watch.time, "time", lambda: pool_watch.time.monotonic())
        monkeypatch.setattr("launch.slurm.submit.run_id_of", lambda _: "r")
        monkeypatch.setattr("launch.slurm.submit.submit_job", self.submit)

    async def cancel(self, ids: list[str]) -> None:
        self.told.append(("cancel", *ids))

    def submit(self, _config: Config, layout: RunLayout, _id: str, job: Job, *how: str, code: str) -> Submission:
        if self.broken:
            self.broken -= 1
            raise OSError(116, "Stale file handle")
        self.told.append(("submit", job.name, *how))
        one = Submission(name=f"n{len(self.told)}", job=job.name, job_id="8", placement="linked", components=[job.name],
                         submitted_at=2.0, reason=how[1])  # fmt: skip
        record.add(layout, one)
        return one

    async def goes_silent(self) -> None:
        """All are there at 1000; 40 s later, four lease times, nobody of RUN has been heard since."""
        await looks(self.watch, self.monkeypatch, (1000, ALL), (1001, ("init", "eval")), (1041, ("init", "eval")))


async def test_a_job_without_its_batch_node_is_submitted_anew(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Lost(layout, monkeypatch)
    await lost.goes_silent()
    assert lost.told == [("cancel", "7"), ("submit", "run", "linked", "continue")]
    lost.slurm.started_at = 1042
    await looks(lost.watch, monkeypatch, (1300, ("init", "eval")), (1350, ("init", "eval")))
    assert len(lost.told) == 2, "its successor may take its time"


@pytest.mark.parametrize(("nodes", "told"), [(1, 1), (2, 0)])
async def test_a_job_whose_second_node_works_on_is_replaced_where_slurm_has_taken_the_first(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, nodes: int, told: int
) -> None:
    """Silent workers on a node that the job still has are the leader's business, which is there."""
    lost = Lost(layout, monkeypatch)
    lost.slurm.node_count = nodes
    second = status("init", "eval")
    second["members"].append({"id": "run-2-abc", "kind": "run", "leases": 1})
    for now, seen in ((1000.0, status(*ALL)), (1001.0, second), (1041.0, second)):
        monkeypatch.setattr(pool_watch.time, "monotonic", lambda now=now: now)
        await lost.watch.look(seen)
    assert lost.slurm.asked == 1 and len(lost.told) == told
    assert ("cancel", "7") not in lost.told, "its second node works on until the successor starts"


async def test_a_job_that_slurm_has_started_again_is_given_time(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Lost(layout, monkeypatch)
    lost.slurm.started_at = 1020
    await lost.goes_silent()
    assert lost.slurm.asked == 1 and lost.told == []


async def test_a_job_of_one_node_is_left_to_slurm(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Lost(layout, monkeypatch, nodes=1)
    await lost.goes_silent()
    await looks(lost.watch, monkeypatch, (1200, ("init", "eval")))
    assert lost.slurm.asked == 1 and lost.told == []


ENDS = [JobState.NODE_FAIL, JobState.BOOT_FAIL, JobState.PREEMPTED]


@pytest.mark.parametrize("state", [*ENDS, JobState.FAILED, JobState.CANCELLED])
@pytest.mark.parametrize("continue_by", ["resubmit", "requeue"])
async def test_where_slurm_queues_nothing_again_a_job_that_it_ended_is_submitted_anew(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, state: JobState, continue_by: str
) -> None:
    lost = Lost(layout, monkeypatch, nodes=1)
    cluster = dataclasses.replace(lost.config.cluster, continue_by=continue_by)  # type: ignore[arg-type]
    lost.watch = PoolWatch(dataclasses.replace(lost.config, cluster=cluster), layout, lost.slurm)  # type: ignore[arg-type]
    lost.slurm.state = state
    await looks(lost.watch, monkeypatch, (1000, ALL), (1001, ("init", "eval")), (1200, ("init", "eval")))
    anew = continue_by == "resubmit" and state in ENDS
    assert lost.told == ([("submit", "run", "linked", "continue")] if anew else [])
    failed = control.message(layout, "fail")
    assert failed == (None if anew else f"component run will not come: its job 7 is {state.value}")


async def test_a_lost_job_is_submitted_anew_only_so_often(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Lost(layout, monkeypatch, nodes=1, most=0)
    cluster = dataclasses.replace(lost.config.cluster, continue_by="resubmit")
    lost.watch = PoolWatch(dataclasses.replace(lost.config, cluster=cluster), layout, lost.slurm)  # type: ignore[arg-type]
    lost.slurm.state = JobState.NODE_FAIL
    await looks(lost.watch, monkeypatch, (1000, ("init", "eval")), (1200, ("init", "eval")))
    assert lost.told == [] and "cluster.max_requeues=0" in (control.message(layout, "fail") or "")


async def test_files_that_fail_for_a_moment_and_strange_jobs_end_nothing(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Lost(layout, monkeypatch)
    lost.broken = 1
    answer = lost.slurm.jobs

    async def more(ids: list[str], **given: object) -> list[JobInfo]:
        return [JobInfo(job_id="70", leader_id="70", state=JobState.FAILED), *await answer(ids, **given)]

    lost.slurm.jobs = more  # type: ignore[method-assign]
    await lost.goes_silent()
    assert lost.told == [("cancel", "7")], "it could not be submitted"
    lost.slurm.state = JobState.CANCELLED
    with monkeypatch.context() as patch:
        patch.setattr(record, "read", lambda _: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
        await looks(lost.watch, monkeypatch, (1200, ("init", "eval")))
    assert lost.told[1:] == []
    await looks(lost.watch, monkeypatch, (1300, ("init", "eval")))
    assert lost.told[1:] == [("submit", "run", "linked", "continue")] and control.message(layout, "fail") is None


async def test_a_job_is_lost_only_so_often(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Lost(layout, monkeypatch, most=0)
    await lost.goes_silent()
    assert lost.told == [("cancel", "7")]
    assert "cluster.max_requeues=0" in (control.message(layout, "fail") or "")
