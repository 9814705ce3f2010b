"""`rollmill cancel` of a run on a cluster: the run ends in order where it can, and Slurm takes what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from launch.errors import Exit
from launch.slurm import cancelling
from launch.slurm.cancelling import NotCancelledError, cancel_jobs
from launch.slurm.client.errors import SlurmUnavailable
from tests.unit.launch.slurm.conftest import Sides
from tests.unit.launch.slurm.leaders import JobSide, het, plain


@pytest.fixture
def made(side: Sides, monkeypatch: pytest.MonkeyPatch) -> JobSide:
    """Linked jobs, of which the added one's submission is as good as any."""
    monkeypatch.setattr(cancelling, "IN_ORDER_S", 0.2)
    monkeypatch.setattr(cancelling, "LOOK_S", 0.01)
    made = side("linked")
    for job_id, job in (("9", "control"), ("10", "run"), ("11", "run+1"), ("12", "run+2")):
        made.note(job_id, job, workers=2 * ("+" in job))
    return made


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Has something happen at the second look for the end."""

    def at_second(deed: Callable[[], Any]) -> None:
        seen, real = [0], cancelling._ended

        def ended(layout: Any) -> bool:
            seen[0] += 1
            if seen[0] == 2:
                deed()
            return real(layout)

        monkeypatch.setattr(cancelling, "_ended", ended)

    return at_second


ALL = ("9", "10", "11", "12")


async def test_a_run_that_waits_is_cancelled_whole_and_has_a_result(made: JobSide) -> None:
    made.slurm.known = [plain(job_id, "PENDING") for job_id in ALL]
    assert await cancel_jobs(made.layout.root) == ["jobs 9, 10, 11, 12 are cancelled"]
    assert made.slurm.told == [("cancel", ALL, "all")]
    assert made.summary()["state"] == "cancelled"


async def test_a_run_that_runs_ends_in_order_first(made: JobSide, looks: Callable[[Callable[[], Any]], None]) -> None:
    made.slurm.known = [plain(job_id, "RUNNING") for job_id in ALL]
    at_the_end: list[int] = []
    looks(lambda: (at_the_end.append(made.slurm.calls["cancel"]), made.leave_summary("cancelled")))
    await cancel_jobs(made.layout.root)
    assert at_the_end == [0], "no scancel before the driver's own end"
    assert made.slurm.told == [("cancel", ALL, "all")]
    assert made.summary() == {"state": "cancelled", "stuck": None}, "the driver's result stays"


async def test_a_run_that_does_not_end_is_taken(made: JobSide) -> None:
    made.slurm.known = [plain(job_id, "RUNNING") for job_id in ALL]
    await cancel_jobs(made.layout.root)
    assert made.slurm.told == [("cancel", ALL, "all")] and made.summary()["state"] == "cancelled"


async def test_without_waiting_the_run_is_left_to_itself(made: JobSide) -> None:
    made.slurm.known = [plain(job_id, "RUNNING") for job_id in ALL]
    assert await cancel_jobs(made.layout.root, wait=False) == ["its jobs end in a moment"]
    assert made.slurm.told == []


async def test_a_failed_runs_leftovers_are_taken_and_a_finished_ones_are_none(made: JobSide) -> None:
    made.leave_summary("failed")
    made.slurm.known = [plain("9", "FAILED"), plain("10", "RUNNING"), plain("11", "PENDING"), plain("12", "PENDING")]
    await cancel_jobs(made.layout.root)
    assert {job.state.value for job in made.slurm.known} == {"failed", "cancelled"}
    before = made.slurm.calls.total()
    made.leave_summary("completed")
    assert await cancel_jobs(made.layout.root) == [] and made.slurm.calls.total() == before


async def test_a_superseded_job_that_still_runs_is_taken_too(made: JobSide) -> None:
    """It lost the node of its batch shell, and its successor waits: nobody else would end it."""
    made.note("13", "run", reason="continue")
    made.note("14", "control", reason="continue")
    states = {"9": "NODE_FAIL", "10": "RUNNING", "11": "PENDING", "12": "PENDING", "13": "PENDING", "14": "PENDING"}
    made.slurm.known = [plain(job_id, state) for job_id, state in states.items()]
    (said,) = await cancel_jobs(made.layout.root)
    assert said == "jobs 10, 11, 12, 13, 14 are cancelled"
    assert {job.state.value for job in made.slurm.known} == {"node_fail", "cancelled"}


async def test_when_slurm_does_not_answer_that_is_said(made: JobSide) -> None:
    made.slurm.error = SlurmUnavailable("squeue: no answer")
    with pytest.raises(NotCancelledError, match="Slurm did not take it: squeue: no answer; the run itself") as caught:
        await cancel_jobs(made.layout.root)
    assert caught.value.exit_code == Exit.FAILED
    assert made.summary() == {}


async def test_a_run_that_runs_ends_also_where_slurm_cannot_be_asked(
    made: JobSide, looks: Callable[[Callable[[], Any]], None]
) -> None:
    """The request lies in a file: a node without Slurm's network is enough to leave it."""
    made.slurm.error = SlurmUnavailable("squeue: no answer")
    made.layout.router_json.write_text("{}")
    looks(lambda: made.leave_summary("cancelled"))
    assert await cancel_jobs(made.layout.root) == []
    assert made.summary()["state"] == "cancelled"


async def test_a_local_run_has_no_jobs(side: Sides) -> None:
    made = side("local")
    assert await cancel_jobs(made.layout.root) == [] and made.slurm.calls == {}


async def test_a_het_job_is_cancelled_by_its_leader(side: Sides) -> None:
    made = side("het")
    made.note("9")
    made.slurm.known = het("PENDING", "PENDING")
    await cancel_jobs(made.layout.root)
    assert made.slurm.told == [("cancel", ("9",), "all")]
