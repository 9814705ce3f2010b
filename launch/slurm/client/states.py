"""Slurm's job states as we count them: what each means for a job, and what a run's jobs together mean for the run.

Slurm's own states are listed in its manual (squeue, "JOB STATE CODES"): twelve base states, and flags that are shown in
their place while something is under way. Two rules stand above the table. A state that is not in it is UNKNOWN, which
has not ended: nothing is ever taken for COMPLETED but COMPLETED. And a job that was preempted, requeued or lost its
node is the same logical job when it is pending again, with one restart more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum


class JobState(StrEnum):
    """What a job is doing, in one word."""

    PENDING = "pending"
    CONFIGURING = "configuring"
    RUNNING = "running"
    SUSPENDED = "suspended"
    COMPLETING = "completing"
    REQUEUED = "requeued"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_FAIL = "node_fail"
    PREEMPTED = "preempted"
    DEADLINE = "deadline"
    BOOT_FAIL = "boot_fail"
    REVOKED = "revoked"
    UNKNOWN = "unknown"

    @property
    def ended(self) -> bool:
        """Whether this job will do nothing more, unless Slurm itself queues it again."""
        return self in _ENDED

    @property
    def waiting(self) -> bool:
        """Whether it has no nodes."""
        return self in {JobState.PENDING, JobState.REQUEUED}

    @property
    def holds_nodes(self) -> bool:
        """Whether its processes run, or are about to."""
        return self in {JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED}

    @property
    def may_return(self) -> bool:
        """Whether Slurm queues such a job again where the site and the job allow it."""
        return self in {JobState.NODE_FAIL, JobState.PREEMPTED, JobState.BOOT_FAIL, JobState.REQUEUED}


_ENDED = frozenset({
    JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT, JobState.OUT_OF_MEMORY,
    JobState.NODE_FAIL, JobState.PREEMPTED, JobState.DEADLINE, JobState.BOOT_FAIL, JobState.REVOKED,
})  # fmt: skip

_LONG: dict[str, JobState] = {
    "PENDING": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "SUSPENDED": JobState.SUSPENDED,
    "COMPLETED": JobState.COMPLETED,
    "CANCELLED": JobState.CANCELLED,
    "FAILED": JobState.FAILED,
    "TIMEOUT": JobState.TIMEOUT,
    "NODE_FAIL": JobState.NODE_FAIL,
    "PREEMPTED": JobState.PREEMPTED,
    "BOOT_FAIL": JobState.BOOT_FAIL,
    "DEADLINE": JobState.DEADLINE,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
    # Flags. Those that change nothing about what the job does are not states of their own.
    "CONFIGURING": JobState.CONFIGURING,
    "POWER_UP_NODE": JobState.CONFIGURING,
    "COMPLETING": JobState.COMPLETING,
    "STAGE_OUT": JobState.COMPLETING,
    "EXPEDITING": JobState.PENDING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STOPPED": JobState.SUSPENDED,
    "REQUEUED": JobState.REQUEUED,
    "REQUEUE_FED": JobState.REQUEUED,
    "REQUEUE_HOLD": JobState.REQUEUED,
    "SPECIAL_EXIT": JobState.REQUEUED,
    "RESV_DEL_HOLD": JobState.PENDING,
    "REVOKED": JobState.REVOKED,
    "LAUNCH_FAILED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
}
_SHORT = {
    "PD": "PENDING", "R": "RUNNING", "S": "SUSPENDED", "CD": "COMPLETED", "CA": "CANCELLED", "F": "FAILED",
    "TO": "TIMEOUT", "NF": "NODE_FAIL", "PR": "PREEMPTED", "BF": "BOOT_FAIL", "DL": "DEADLINE", "OOM": "OUT_OF_MEMORY",
    "CF": "CONFIGURING", "CG": "COMPLETING", "SO": "STAGE_OUT", "RS": "RESIZING", "SI": "SIGNALING", "ST": "STOPPED",
    "RQ": "REQUEUED", "RF": "REQUEUE_FED", "RH": "REQUEUE_HOLD", "SE": "SPECIAL_EXIT", "RD": "RESV_DEL_HOLD",
    "RV": "REVOKED",
}  # fmt: skip
# Of several words for one job the first of these wins: a flag says more about the moment than the base state below it.
_PRECEDENCE = (
    JobState.REVOKED, JobState.COMPLETING, JobState.REQUEUED, JobState.CONFIGURING, JobState.SUSPENDED,
)  # fmt: skip


def job_state(said: str | Iterable[str]) -> JobState:
    """The state that Slurm's word, words or list of flags stand for; UNKNOWN for anything that is not in its manual.

    Reads "RUNNING", "CANCELLED by 1001", "PD", "RUNNING,COMPLETING", "RUNNING+COMPLETING" and lists of words.
    """
    words = said.replace("+", ",").split(",") if isinstance(said, str) else list(said)
    found = [_one(word) for word in words if word.strip()]
    if not found:
        return JobState.UNKNOWN
    state = next((one for one in _PRECEDENCE if one in found), found[0])
    # A flag that a newer Slurm shows beside an end may mean that it is not the end.
    return JobState.UNKNOWN if state.ended and JobState.UNKNOWN in found else state


def _one(word: str) -> JobState:
    name = word.split()[0].upper().rstrip("*")
    return _LONG.get(_SHORT.get(name, name), JobState.UNKNOWN)


def latest(attempts: Sequence[JobState]) -> tuple[JobState, int]:
    """State and number of restarts of one logical job from what accounting says of it, oldest first.

    Accounting begins a new record when a job is queued again, and also when it goes on with fewer nodes (RESIZING):
    only the first is a restart.
    """
    if not attempts:
        return JobState.UNKNOWN, 0
    return attempts[-1], sum(state.may_return for state in attempts[:-1])
