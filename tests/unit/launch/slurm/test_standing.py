"""How a run's submissions stand before another is made."""

from __future__ import annotations

import pytest

from launch.slurm import record
from launch.slurm.client.errors import SlurmUnavailable
from launch.slurm.standing import live_jobs
from tests.unit.launch.slurm.conftest import Sides
from tests.unit.launch.slurm.leaders import het, plain


async def test_what_has_ended_or_was_replaced_does_not_live(side: Sides) -> None:
    made = side("linked")
    for job_id, job in (("8", "run"), ("9", "control"), ("10", "run")):
        made.note(job_id, job)
    made.slurm.known = [plain("8", "RUNNING"), plain("9", "TIMEOUT"), plain("10", "PENDING")]
    live = await live_jobs(made.config, record.read(made.layout))
    assert [job.job_id for job in live] == ["10"]
    assert made.slurm.calls == {"jobs": 1}


@pytest.mark.parametrize("states", [("RUNNING", "CANCELLED"), ("PENDING", "FAILED")])
async def test_half_a_heterogeneous_job_is_ended(side: Sides, states: tuple[str, str]) -> None:
    made = side("het")
    made.note("9")
    made.slurm.known = het(*states)
    assert await live_jobs(made.config, record.read(made.layout)) == []
    assert made.slurm.told == [("cancel", ("9",), "all")]


async def test_nothing_is_said_where_slurm_does_not_answer(side: Sides) -> None:
    made = side("het")
    made.note("9")
    made.slurm.error = SlurmUnavailable("squeue: no answer")
    with pytest.raises(SlurmUnavailable):
        await live_jobs(made.config, record.read(made.layout))
