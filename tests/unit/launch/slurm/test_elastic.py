"""Workers that are added and taken away: numbers, names, bounds, and what the autoscaler does with a decision."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from conf.schema import Autoscale, Config
from launch.errors import CommandError
from launch.slurm import elastic, record
from launch.slurm.elastic import Autoscaler, scale
from tests.unit.launch.slurm.conftest import Sides
from tests.unit.launch.slurm.leaders import JobSide, plain


@pytest.fixture
def made(side: Sides) -> JobSide:
    made = side("linked", max_submissions_per_hour=4)
    for job_id, job in (("9", "control"), ("10", "init"), ("11", "run")):
        made.note(job_id, job)
    return made


async def test_every_addition_is_a_job_of_its_own_with_numbers_of_its_own(made: JobSide) -> None:
    for _ in range(3):
        assert "2 more run workers asked for" in await scale(made.config, made.layout, "run", 2)
    added = record.read(made.layout)[3:]
    assert [(one.job, one.first, one.workers) for one in added] == [("run+1", 2, 2), ("run+2", 4, 2), ("run+3", 6, 2)]
    ids = {one.job_id for one in record.current(record.read(made.layout))}
    assert ids == {"9", "10", "11", "100", "101", "102"}, "status and cancel see all of them"


async def test_the_newest_additions_go_first_and_the_pools_own_workers_stay(made: JobSide) -> None:
    for workers in (2, 1):
        await scale(made.config, made.layout, "run", workers)
    assert await scale(made.config, made.layout, "run", -2) == "3 added run workers end: job 101, 100"
    assert made.slurm.told == [("cancel", ("101", "100"), "all")]
    with pytest.raises(CommandError, match="the run's own stay to its end"):
        await scale(made.config, made.layout, "run", -1)


async def test_numbers_of_workers_that_went_are_not_given_again(made: JobSide) -> None:
    await scale(made.config, made.layout, "run", 2)
    await scale(made.config, made.layout, "run", -2)
    await scale(made.config, made.layout, "run", 1)
    (added,) = elastic.added_jobs(record.read(made.layout), "run")
    assert (added.job, added.first) == ("run+2", 4)


def status(queued: int, **leases: int) -> dict[str, Any]:
    members = [{"id": f"{name.replace('_', '-')}-x", "leases": count} for name, count in leases.items()]
    return {"state": "running", "stages": {"run": {"queued": queued}}, "members": members}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(elastic.time, "monotonic", lambda: now[0])
    return now


def autoscaled(made: JobSide, **keys: Any) -> Config:
    run = replace(made.config.pools.run, autoscale=Autoscale(**{"max": 1, "queue": 8, "idle_s": 60.0, **keys}))
    return replace(made.config, pools=replace(made.config.pools, run=run))


async def test_the_autoscaler_grows_and_shrinks_and_each_counts_against_the_hour(
    made: JobSide, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    for one in record.read(made.layout):
        record.forget(made.layout, one)
    made.note("9", "control", submitted_at=time.time())
    scaler = Autoscaler(autoscaled(made), made.layout)
    for _ in range(5):
        await scaler.look(status(20, run_1=8))
        clock[0] += 40
        for number in (2, 3, 4):  # whichever was added: busy, then idle for long enough
            workers = {"run_1": 0, f"run_{number}": 0}
            await scaler.look(status(0, **workers))
            clock[0] += 61
            await scaler.look(status(0, **workers))
            clock[0] += 40
    assert [name for name, _ in made.sbatch.made] == ["run+1", "run+2", "run+3"]
    assert [one[1] for one in made.slurm.told] == [("100",), ("101",), ("102",)]
    assert record.in_last_hour(record.read(made.layout, forgotten=True)) == 4, "cluster.max_submissions_per_hour"
    assert capsys.readouterr().err.count("were idle: ended") == 3


async def test_a_refusal_is_said_and_the_run_goes_on(
    made: JobSide, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    made.sbatch.refused = {"run+1"}
    await Autoscaler(autoscaled(made), made.layout).look(status(20, run_1=8))
    assert "the RUN pool stays as it is: Slurm refused run+1" in capsys.readouterr().err


async def test_added_jobs_that_died_make_room_and_those_that_wait_do_not(
    made: JobSide, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    made.note("20", "run+1", workers=1, first=2, submitted_at=now - 700)
    scaler = Autoscaler(autoscaled(made, max=1), made.layout)
    made.slurm.known = [plain("20", "PENDING")]
    for _ in range(5):
        await scaler.look(status(99, run_1=8))
        clock[0] += 40
    assert made.sbatch.made == [] and made.slurm.calls["jobs"] == 1
    await scaler.look(status(99, run_1=8, run_2=8))
    made.slurm.known = [plain("20", "NODE_FAIL")]
    clock[0] += 600
    await scaler.look(status(99))
    assert made.slurm.calls["jobs"] == 1, "where all workers are silent it is the router that cannot tell"
    clock[0] += 40
    await scaler.look(status(99, run_1=8))
    assert [name for name, _ in made.sbatch.made] == ["run+2"]
    assert "added job 20 has ended" in capsys.readouterr().err


async def test_a_file_system_that_fails_for_a_moment_ends_no_run(
    made: JobSide, clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(record, "read", broken)
    await Autoscaler(autoscaled(made), made.layout).look(status(99, run_1=8))
    assert "stays as it is: [Errno 116] Stale file handle" in capsys.readouterr().err


async def test_a_run_that_drains_is_left_alone(made: JobSide, clock: list[float]) -> None:
    await Autoscaler(autoscaled(made), made.layout).look({**status(99, run_1=8), "state": "draining"})
    assert made.sbatch.made == []
