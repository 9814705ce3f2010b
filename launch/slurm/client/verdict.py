"""What a run's own record and its jobs' states mean together: the run's state, and whether half of a job is dead. Pure.

The run's own record comes first: a step that Slurm calls OUT_OF_MEMORY, because a sandbox ran into its limit there,
says nothing about a run whose summary says that it is done. Without a record the job that holds the router decides; a
job that waits again after a preemption is the same run, one attempt later.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from launch.slurm.client.protocol import JobInfo
from launch.slurm.client.states import JobState

FINAL: Final = frozenset({"completed", "failed", "cancelled"})
_LIVELY: Final = (
    JobState.RUNNING, JobState.SUSPENDED, JobState.CONFIGURING, JobState.COMPLETING, JobState.REQUEUED,
    JobState.PENDING, JobState.UNKNOWN,
)  # fmt: skip
_BECAUSE: Final = {
    JobState.TIMEOUT: "reached its time limit",
    JobState.OUT_OF_MEMORY: "ran out of memory",
    JobState.NODE_FAIL: "lost a node and was not queued again",
    JobState.PREEMPTED: "was preempted and not queued again",
    JobState.DEADLINE: "reached its deadline",
    JobState.BOOT_FAIL: "got a node that did not boot",
    JobState.REVOKED: "was given to another cluster of the federation",
    JobState.COMPLETED: "ended without leaving a result",
}


ABANDONED: Final = "nothing carries it on; `rollmill resume` does"
"""Of a run that was to go on, while no job of it is left to do so."""


class Verdict(NamedTuple):
    """A run's state in the words of `status --json`, and why where it is no good news."""

    state: str
    reason: str | None = None


def verdict(
    own: str, jobs: Sequence[JobInfo], *, control: Collection[str] = (), final: bool = False, continued: bool = False
) -> Verdict:
    """The run's state.

    Args:
        own: what the run itself says: its router, its summary or its journal.
        jobs: the jobs of its newest submissions, as far as Slurm knows them.
        control: leader ids of the jobs that may hold the router; empty: any.
        final: whether `own` is the state in its summary.
        continued: whether the newest submission carries an earlier one on.
    """
    if final and own in {"completed", "cancelled"}:
        return Verdict(own)
    heads = [job for job in jobs if job.het_offset in (None, 0) and (not control or job.leader_id in control)]
    if not heads:
        return Verdict(own)
    head = min(heads, key=_liveliness)
    if head.state.waiting:
        left = final and own == "requeued"
        again = left or head.restarts > 0 or head.state is JobState.REQUEUED or continued
        return Verdict("requeued" if again else "starting")
    if head.state is JobState.UNKNOWN:
        return Verdict(own)
    if not head.state.ended:
        return Verdict(own if final or own in {"running", "draining"} else "starting")
    if head.state is JobState.CANCELLED and not (final and own == "failed"):
        return Verdict("cancelled")
    if final and own == "requeued":
        return Verdict("failed", ABANDONED)
    return Verdict(own) if final else Verdict("failed", _why(head))


def _liveliness(job: JobInfo) -> tuple[int, int]:
    """Sorts what runs before what waits before what has ended, and of those the newest first."""
    place = _LIVELY.index(job.state) if job.state in _LIVELY else len(_LIVELY)
    return place, -(job.submitted_at or 0)


def _why(job: JobInfo) -> str:
    because = _BECAUSE.get(job.state)
    if because is None:
        ended_by = f"signal {job.exit_signal}" if job.exit_signal else f"exit code {job.exit_code}"
        because = f"ended as {job.state.value}, {ended_by}"
    where = f" on {job.nodes[0]}" if job.nodes else ""
    return f"job {job.job_id} {because}{where}; `rollmill logs` has what it said, `rollmill resume` carries the run on"


def half_dead(jobs: Sequence[JobInfo]) -> list[str]:
    """Leader ids of heterogeneous jobs of which one component has ended while another runs or waits.

    Slurm does this when a component is cancelled alone, and at a node failure under --no-kill; the rest never works.
    """
    components: dict[str, list[JobInfo]] = {}
    for job in jobs:
        if job.het_offset is not None:
            components.setdefault(job.leader_id, []).append(job)
    return [
        leader
        for leader, parts in components.items()
        if any(job.state.ended for job in parts) and any(job.state.waiting or job.state.holds_nodes for job in parts)
    ]
