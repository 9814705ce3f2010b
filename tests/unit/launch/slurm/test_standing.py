"""How a run's submissions stand before another is made."""

from __future__ import annotations

import pytest

from launch.slurm import record
from launch.slurm.client.errors import SlurmUnavailable
from launch.slurm.standing import carry_on, end_leftovers, live_jobs
from tests.unit.launch.slurm.conftest import Sides
from tests.unit.launch.slurm.leaders import ScriptedSlurm, het, plain


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


async def test_jobs_are_asked_for_and_ended_where_they_are(side: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    made = side("linked", clusters=["east", "west"])
    slurms = {("east",): ScriptedSlurm([plain("9", "TIMEOUT"), plain("10", "RUNNING")]),
              ("west",): ScriptedSlurm([plain("10", "RUNNING"), plain("11", "PENDING")])}  # fmt: skip
    monkeypatch.setattr("launch.slurm.standing.open_client", lambda clusters: slurms[tuple(clusters)])
    made.note("9", "control", clusters=["east"])
    made.note("10", "run", clusters=["east"])
    made.note("11", "run+1", clusters=["west"], workers=2)
    noted = record.read(made.layout)
    live = await live_jobs(made.config, noted)
    assert [job.job_id for job in live] == ["10", "11"] and not carry_on(noted, live)
    assert await end_leftovers(made.layout, noted, live) == ["10", "11"]
    assert slurms["east",].told == [("cancel", ("10",), "all")]
    assert slurms["west",].told == [("cancel", ("11",), "all")], "a stranger's job of the same number stays"
    assert [one.job_id for one in record.read(made.layout)] == ["9", "10"], "what was added is not part of it any more"
