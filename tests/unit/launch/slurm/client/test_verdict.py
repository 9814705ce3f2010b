"""A run's state from its own record and its jobs."""

from __future__ import annotations

import pytest

from launch.slurm.client.protocol import JobInfo
from launch.slurm.client.states import JobState, job_state
from launch.slurm.client.verdict import half_dead, verdict


def job(state: str, job_id: str = "9", **more: object) -> JobInfo:
    leader, _, offset = job_id.partition("+")
    return JobInfo(
        job_id=job_id, leader_id=leader, het_offset=int(offset) if offset else None, state=job_state(state), **more
    )  # type: ignore[arg-type]


def het(*states: str, **more: object) -> list[JobInfo]:
    return [job(state, f"9+{offset}", **more) for offset, state in enumerate(states)]


def test_a_runs_own_record_of_its_end_comes_first() -> None:
    assert verdict("completed", het("OUT_OF_MEMORY", "OUT_OF_MEMORY"), final=True).state == "completed"
    assert verdict("completed", [job("FAILED")], final=True).state == "completed"
    assert verdict("completed", [job("RUNNING")], final=True).state == "completed"
    assert verdict("cancelled", [job("PENDING")], final=True).state == "cancelled"
    assert verdict("failed", [job("CANCELLED")], final=True).state == "failed"


@pytest.mark.parametrize("own", ["starting", "running", "draining", "failed"])
def test_cancelled_in_slurm_is_cancelled(own: str) -> None:
    assert verdict(own, het("CANCELLED", "CANCELLED")).state == "cancelled"


@pytest.mark.parametrize(
    ("said", "words"),
    [("TIMEOUT", "reached its time limit"), ("OUT_OF_MEMORY", "ran out of memory"), ("NODE_FAIL", "lost a node"),
     ("PREEMPTED", "preempted and not queued again"), ("DEADLINE", "deadline"), ("BOOT_FAIL", "did not boot"),
     ("COMPLETED", "without leaving a result"), ("FAILED", "exit code 3"), ("REVOKED", "federation")],
)  # fmt: skip
def test_an_end_without_a_record_is_a_failure_that_says_why(said: str, words: str) -> None:
    found = verdict("running", [job(said, exit_code=3, nodes=("cpu4",))])
    assert found.state == "failed"
    assert found.reason is not None
    assert words in found.reason
    assert "job 9 " in found.reason
    assert "on cpu4" in found.reason


def test_waiting_is_starting_the_first_time_and_requeued_after() -> None:
    assert verdict("starting", het("PENDING", "PENDING")).state == "starting"
    assert verdict("starting", [job("CONFIGURING")]).state == "starting"
    assert verdict("failed", [job("PENDING", restarts=1)]).state == "requeued"
    assert verdict("running", [job("REQUEUE_HOLD")]).state == "requeued"
    assert verdict("requeued", [job("PENDING")], final=True, continued=True).state == "requeued"
    assert verdict("failed", [job("PENDING")], final=True, continued=True).state == "requeued"


def test_parity_b23_preempted_then_running_is_one_logical_job() -> None:
    first, again, later = job("RUNNING"), job("PENDING", restarts=1), job("RUNNING", restarts=1)
    states = [verdict("running", [one]).state for one in (first, again, later)]
    assert states == ["running", "requeued", "running"]
    assert first.leader_id == later.leader_id


def test_running_is_what_the_run_says_and_starting_until_it_does() -> None:
    assert verdict("running", [job("RUNNING")]).state == "running"
    assert verdict("draining", [job("RUNNING")]).state == "draining"
    assert verdict("failed", [job("RUNNING", restarts=1)]).state == "starting", "the last attempt's files say failed"
    assert verdict("requeued", [job("RUNNING")], final=True).state == "requeued"
    assert verdict("running", [job("COMPLETING")]).state == "running"
    assert verdict("running", [job("RUNNING,SUSPENDED")]).state == "running"


def test_drained_and_left_is_requeued_until_someone_cancels_it() -> None:
    left = verdict("requeued", [job("FAILED", exit_code=75)], final=True)
    assert left == ("failed", "nothing carries it on; `rollmill resume` does")
    assert verdict("requeued", [job("CANCELLED")], final=True).state == "cancelled"


def test_only_the_routers_job_decides() -> None:
    jobs = [job("RUNNING", "9"), job("FAILED", "10"), job("PENDING", "11")]
    assert verdict("running", jobs, control={"9"}).state == "running"
    assert verdict("starting", jobs, control={"11"}).state == "starting"
    assert verdict("running", het("RUNNING", "CANCELLED"), control={"9"}).state == "running"


def test_of_two_placements_the_one_that_runs_decides() -> None:
    both = [*het("RUNNING", "RUNNING"), job("PENDING", "10", reason="BeginTime")]
    assert verdict("running", both, control={"9", "10"}).state == "running"
    both = [*het("CANCELLED", "CANCELLED"), job("PENDING", "10")]
    assert verdict("starting", both, control={"9", "10"}).state == "starting"


def test_without_word_from_slurm_the_run_is_believed() -> None:
    assert verdict("running", []).state == "running"
    assert verdict("running", [job("SOMETHING_NEW")]).state == "running"


def test_half_dead_jobs() -> None:
    assert half_dead(het("PENDING", "FAILED")) == ["9"]
    assert half_dead(het("RUNNING", "CANCELLED", "RUNNING")) == ["9"]
    assert half_dead(het("PENDING", "PENDING")) == []
    assert half_dead(het("RUNNING", "PENDING")) == [], "they start one after the other"
    assert half_dead(het("COMPLETING", "COMPLETED")) == [], "they end one after the other"
    assert half_dead(het("CANCELLED", "CANCELLED")) == []
    assert half_dead([job("RUNNING", "9"), job("FAILED", "10")]) == [], "linked jobs live apart"
    assert JobState.REQUEUED.waiting
