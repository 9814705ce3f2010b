"""Every state of Slurm's manual is mapped, nothing unknown ever counts as done."""

from __future__ import annotations

import re

import pytest

from launch.slurm.client.states import JobState, job_state, latest

# The manual's words (squeue, JOB STATE CODES, 22.05 to 25.05), long and short, and what each has to be for us.
MANUAL = {
    "BOOT_FAIL BF": "boot_fail", "CANCELLED CA": "cancelled", "COMPLETED CD": "completed",
    "CONFIGURING CF": "configuring", "COMPLETING CG": "completing", "DEADLINE DL": "deadline", "FAILED F": "failed",
    "NODE_FAIL NF": "node_fail", "OUT_OF_MEMORY OOM": "out_of_memory", "PENDING PD": "pending",
    "PREEMPTED PR": "preempted", "RUNNING R": "running", "RESV_DEL_HOLD RD": "pending", "REQUEUE_FED RF": "requeued",
    "REQUEUE_HOLD RH": "requeued", "REQUEUED RQ": "requeued", "RESIZING RS": "running", "REVOKED RV": "revoked",
    "SIGNALING SI": "running", "SPECIAL_EXIT SE": "requeued", "STAGE_OUT SO": "completing", "STOPPED ST": "suspended",
    "SUSPENDED S": "suspended", "TIMEOUT TO": "timeout", "POWER_UP_NODE": "configuring", "LAUNCH_FAILED": "failed",
    "RECONFIG_FAIL": "failed", "EXPEDITING": "pending",
}  # fmt: skip


@pytest.mark.parametrize(("words", "state"), MANUAL.items())
def test_the_manuals_states(words: str, state: str) -> None:
    assert {job_state(word) for word in words.split()} == {JobState(state)}
    assert {job_state([word]) for word in words.split()} == {JobState(state)}


def test_only_completed_is_completed() -> None:
    completed = [words for words, state in MANUAL.items() if job_state(words.split()[0]) is JobState.COMPLETED]
    assert completed == ["COMPLETED CD"]
    for word in ("", "?", "DONE", "COMPLETE", "COMPLETED_ISH", "FINISHED", "SOMETHING_NEW", "C"):
        assert job_state(word) is JobState.UNKNOWN
        assert not job_state(word).ended


def test_what_stands_beside_a_state() -> None:
    assert job_state("CANCELLED by 1001") is JobState.CANCELLED
    assert job_state("CANCELLED+") is JobState.CANCELLED
    assert job_state("running") is JobState.RUNNING
    assert job_state(["RUNNING", "COMPLETING"]) is JobState.COMPLETING
    assert job_state("FAILED,COMPLETING") is JobState.COMPLETING
    assert job_state(["PENDING", "REQUEUED"]) is JobState.REQUEUED
    assert job_state(["RUNNING", "CONFIGURING"]) is JobState.CONFIGURING
    assert job_state(["RUNNING", "FLAG_OF_2031"]) is JobState.RUNNING
    assert job_state(["COMPLETED", "FLAG_OF_2031"]) is JobState.UNKNOWN
    assert job_state([]) is JobState.UNKNOWN


def test_which_states_end_a_job() -> None:
    ended = {state for state in JobState if state.ended}
    assert {state.value for state in ended} == {
        "completed", "failed", "cancelled", "timeout", "out_of_memory", "node_fail", "preempted", "deadline",
        "boot_fail", "revoked",
    }  # fmt: skip
    assert not any(state.waiting or state.holds_nodes for state in ended)
    assert all(re.fullmatch("[a-z_]+", str(state)) for state in JobState)


def test_parity_b22_no_end_of_a_job_is_taken_for_completed() -> None:
    bad = ["TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "DEADLINE", "BOOT_FAIL"]
    assert [job_state(word).value for word in bad] == [word.lower() for word in bad]


def test_attempts_of_one_logical_job() -> None:
    preempted, running, resized = JobState.PREEMPTED, JobState.RUNNING, job_state("RESIZING")
    assert latest([preempted, JobState.PENDING]) == (JobState.PENDING, 1)
    assert latest([preempted, JobState.NODE_FAIL, running]) == (running, 2)
    assert latest([resized, running]) == (running, 0), "fewer nodes is no new attempt"
    assert latest([running]) == (running, 0)
    assert latest([]) == (JobState.UNKNOWN, 0)
