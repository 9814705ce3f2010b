"""How a job of workers learns that its run is over, and how seldom it asks Slurm. The hours pass in no time."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest

from launch.slurm import run_over
from launch.slurm.client.errors import SlurmUnavailable
from launch.slurm.client.protocol import JobInfo
from launch.slurm.run_over import run_is_over
from stages import beacon
from stages.beacon import Beacon
from tests.unit.launch.slurm.conftest import Sides
from tests.unit.launch.slurm.leaders import JobSide, plain

YIELD = asyncio.sleep


class Hours:
    """A clock that moves by what is slept; what happens when is told by the second."""

    def __init__(self) -> None:
        self.now, self.events = 0.0, {}  # type: ignore[var-annotated]

    async def sleep(self, seconds: float) -> None:
        before, self.now = self.now, self.now + seconds
        for at in sorted(self.events):
            if before < at <= self.now:
                self.events[at]()
        await YIELD(0)


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Hours:
    clock = Hours()
    monkeypatch.setattr(run_over, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def inline(function, *args):  # type: ignore[no-untyped-def]
        return function(*args)

    monkeypatch.setattr(run_over, "asyncio", SimpleNamespace(sleep=clock.sleep, to_thread=inline))
    return clock


@pytest.fixture
def made(side: Sides) -> JobSide:
    made = side("linked")
    made.note("9", "control")
    made.note("10", "run")
    return made


def beat(made: JobSide, number: int, *, ended: bool = False) -> None:
    lives = Beacon(epoch=1, url="http://127.0.0.1:9", node="n", pid=1, beat=number, ended=ended)
    beacon.write(made.layout, lives)


async def over(made: JobSide) -> str:
    async with asyncio.timeout(30):
        return await run_is_over(made.config, made.layout)


def knows(made: JobSide, *jobs: JobInfo) -> None:
    made.slurm.known = list(jobs)


async def test_while_the_beat_moves_slurm_is_never_asked(made: JobSide, hours: Hours) -> None:
    beat(made, 0)
    hours.events = {float(at): lambda at=at: beat(made, at) for at in range(2, 600, 2)}
    hours.events[599.0] = lambda: (beat(made, 601, ended=True), made.leave_summary("completed"))
    assert await over(made) == "the run completed"
    assert made.slurm.calls == {}


async def test_a_router_that_has_not_come_yet_is_not_asked_for_at_once(made: JobSide, hours: Hours) -> None:
    knows(made, plain("9", "PENDING"))
    hours.events = {295.0: lambda: knows(made)}
    assert await over(made) == "Slurm does not know the router's job 9 any more"
    assert hours.now > 300 and made.slurm.calls["jobs"] == 1


@pytest.mark.parametrize(("job_id", "after_s"), [("10", 120), ("9", 0)])
async def test_the_result_of_an_attempt_before_this_job_was_submitted_counts_where_it_stays(
    made: JobSide, hours: Hours, job_id: str, after_s: int
) -> None:
    made.is_job(job_id)
    made.leave_summary("failed")
    os.utime(made.layout.summary, (1009.5, 1009.5))  # submitted after job 9, at 1009, and before job 10
    assert await over(made) == "the run failed"
    assert after_s <= hours.now <= after_s + 4
    hours.now = 0.0
    hours.events = {60.0: lambda: made.layout.summary.unlink(), 200.0: lambda: made.leave_summary("completed")}
    if job_id == "10":
        assert await over(made) == "the run completed", "what a slow file system showed goes away"


async def test_a_router_that_left_to_come_back_is_waited_for(made: JobSide, hours: Hours) -> None:
    beat(made, 1, ended=True)
    made.leave_summary("requeued")
    knows(made, plain("9", "PENDING"))
    hours.events = {
        900.0: lambda: made.layout.summary.unlink(),
        901.0: lambda: beat(made, 2),
        905.0: lambda: (beat(made, 3, ended=True), made.leave_summary("failed")),
    }
    assert await over(made) == "the run failed"
    assert 5 <= made.slurm.calls["jobs"] <= 6, "after 1, 1.5, 2.25, 3.4 and 5 minutes, less the jitter"


@pytest.mark.parametrize("state", ["TIMEOUT", "FAILED", "CANCELLED", "NODE_FAIL"])
async def test_silence_is_explained_by_slurm(made: JobSide, hours: Hours, state: str) -> None:
    beat(made, 1)
    knows(made, plain("9", "RUNNING"))
    hours.events = {300.0: lambda: knows(made, plain("9", state))}
    assert await over(made) == f"the router's job 9 is {state.lower()}"
    assert 300 <= hours.now <= 500


async def test_a_job_that_slurm_forgot_is_over_and_one_that_it_cannot_tell_of_is_not(
    made: JobSide, hours: Hours
) -> None:
    made.slurm.error = SlurmUnavailable("squeue: no answer")
    hours.events = {1000.0: lambda: setattr(made.slurm, "error", None)}
    assert await over(made) == "Slurm does not know the router's job 9 any more"
    assert hours.now >= 1000


async def test_of_two_placements_one_that_waits_is_enough_to_stay(made: JobSide, hours: Hours) -> None:
    made.note("12", reason="resume")
    knows(made, plain("9", "CANCELLED"), plain("12", "PENDING"))
    hours.events = {600.0: lambda: made.leave_summary("cancelled")}
    assert await over(made) == "the run cancelled"


async def test_files_that_cannot_be_read_for_a_while_end_nothing(
    made: JobSide, hours: Hours, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([OSError(5, "Input/output error")] * 5)

    def broken(_: object) -> None:
        error = next(looks, None)
        if error is not None:
            raise error

    monkeypatch.setattr(beacon, "read", broken)
    knows(made, plain("9", "RUNNING"))
    hours.events = {60.0: lambda: made.leave_summary("completed")}
    assert await over(made) == "the run completed"
