"""action=run on a cluster: it returns when the run has ended, or when nothing is left that would carry it on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from launch.errors import Exit
from launch.slurm import follow as follow_module
from launch.slurm.follow import RunAbandonedError, follow
from launch.slurm.watch import RunWatch
from tests.support.waiting import eventually
from tests.unit.launch.slurm.conftest import Sides
from tests.unit.launch.slurm.leaders import JobSide, plain


@pytest.fixture
def made(side: Sides, monkeypatch: pytest.MonkeyPatch) -> JobSide:
    """A linked run whose driver left to come back."""
    made = side("linked")
    made.note("9", "control")
    made.note("10", "run")
    rollouts = {"accepted": 4, "completed": 2, "failed": 0, "cancelled": 0, "open": 2}
    summary = {"state": "requeued", "stuck": None, "rollouts": rollouts, "stages": {}}
    made.layout.summary.write_text(json.dumps(summary))
    monkeypatch.setattr(follow_module, "LOOK_S", 0.01)
    return made


def watch(made: JobSide) -> RunWatch:
    return RunWatch(made.config, made.layout, made.slurm)


@pytest.mark.parametrize("known", [[plain("9", "FAILED"), plain("10", "RUNNING")], [plain("10", "PENDING")], []])
async def test_a_run_that_nothing_carries_on_is_left(made: JobSide, known: list[Any]) -> None:
    made.slurm.known = known
    status = await watch(made).status()
    assert (status["state"], status["stuck"]) == ("failed", "nothing carries it on; `rollmill resume` does")
    with pytest.raises(RunAbandonedError, match="nothing carries it on") as caught:
        async with asyncio.timeout(20):
            await follow(watch(made), made.layout, visibility_s=0.05)
    assert caught.value.exit_code == Exit.REQUEUED


@pytest.mark.parametrize("state", ["PENDING", "REQUEUED", "COMPLETING"])
async def test_a_run_whose_router_waits_goes_on(made: JobSide, state: str) -> None:
    made.slurm.known = [plain("9", state)]
    assert (await watch(made).status())["state"] == "requeued"


async def test_a_successor_that_was_noted_since_the_last_answer_carries_it_on(made: JobSide) -> None:
    made.slurm.known = [plain("9", "RUNNING")]
    looking = watch(made)
    assert (await looking.status())["state"] == "requeued"
    made.note("20", "control", reason="continue")
    looking._read_at = float("-inf")
    assert (await looking.status())["state"] == "requeued" and made.slurm.calls["jobs"] == 1


async def test_a_record_that_is_seen_late_is_waited_for(made: JobSide) -> None:
    made.slurm.known = [plain("9", "FAILED"), plain("20", "PENDING")]
    following = asyncio.create_task(follow(watch(made), made.layout, visibility_s=3600.0))
    await eventually(lambda: made.slurm.calls["jobs"] > 0, "Slurm was asked")
    made.leave_summary("completed")
    async with asyncio.timeout(20):
        assert await following == Exit.DONE


async def test_where_slurm_does_not_answer_it_stays_requeued(made: JobSide) -> None:
    from launch.slurm.client.errors import SlurmUnavailable

    made.slurm.error = SlurmUnavailable("squeue: no answer")
    assert (await watch(made).status())["state"] == "requeued"
