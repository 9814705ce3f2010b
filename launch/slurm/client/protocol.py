"""What the launcher asks of Slurm, and the records that it gets: one small Protocol, whatever answers behind it.

All times are unix seconds, all memory is MiB, all time limits are minutes; None is "Slurm does not say", and for a
limit "unlimited". Every call knows the clusters that its client was made for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Protocol

import msgspec

from launch.slurm.client.states import JobState

EARLY_S: Final = 2.0
"""By how much an end before the time limit's is more than rounding."""
UNLIMITED_S: Final = 365 * 86400.0
"""Of a job without a limit Slurm names an end all the same, a year after its start (slurmctld, job_mgr.c)."""

Source = Literal["squeue", "sacct", "scontrol", "pyslurm"]


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One job, or one component of a heterogeneous job.

    Args:
        job_id: as Slurm writes it to people: "9", or "9+1" for a component.
        leader_id: "9" for both.
        het_offset: the component's number, or None for an ordinary job.
        state: what it is doing.
        reason: why it waits or failed, in Slurm's own word; None where Slurm says "None".
        nodes: the nodes that it has or had, expanded.
        ended_at: when it ended, or, while it has nodes, when its time limit or a preemption's grace will end it.
        estimated_start: where it is pending and the scheduler has looked at it.
        restarts: how often Slurm has queued it again; attempts - 1.
        exit_code: of the batch script; 0 until it has ended.
        exit_signal: that ended it, or 0.
        gpus: of all nodes together, as cpus.
        source: who said so.
    """

    job_id: str
    leader_id: str
    het_offset: int | None = None
    name: str = ""
    user: str = ""
    account: str = ""
    partition: str = ""
    qos: str = ""
    cluster: str = ""
    comment: str = ""
    state: JobState = JobState.UNKNOWN
    reason: str | None = None
    nodes: tuple[str, ...] = ()
    node_count: int = 0
    cpus: int = 0
    gpus: int = 0
    submitted_at: int | None = None
    eligible_at: int | None = None
    started_at: int | None = None
    ended_at: int | None = None
    estimated_start: int | None = None
    time_limit_min: int | None = None
    priority: int | None = None
    restarts: int = 0
    exit_code: int = 0
    exit_signal: int = 0
    source: Source = "squeue"


def ends_early(job: JobInfo) -> bool:
    """Whether Slurm names an end of the job before its time limit's, as it does in a preemption's grace."""
    if job.ended_at is None or job.started_at is None:
        return False
    limit_s = UNLIMITED_S if job.time_limit_min is None else 60 * job.time_limit_min
    return job.ended_at < job.started_at + limit_s - EARLY_S


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One node: what it has and what of it is free now. `state` is Slurm's short word in lower case, without marks."""

    name: str
    state: str
    cpus: int
    idle_cpus: int
    mem_mib: int
    gpus: int = 0
    gres: str = ""
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether a job could start on all of it now."""
        return self.state == "idle"

    @property
    def usable(self) -> bool:
        """Whether jobs are given it at all."""
        return self.state in {"idle", "mix", "mixed", "alloc", "allocated", "comp", "completing", "plnd", "planned"}


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """One partition: its rules, and the most that one of its nodes has (`cpus`, `mem_mib`, `gpus`)."""

    name: str
    default: bool = False
    up: bool = True
    nodes: tuple[str, ...] = ()
    cpus: int = 0
    mem_mib: int = 0
    gpus: int = 0
    gres: str = ""
    max_time_min: int | None = None
    max_nodes: int | None = None
    grace_time_s: int = 0
    preempt_mode: str = "OFF"


class SiteInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a cluster is: its version, its rules, its partitions and nodes.

    Args:
        bf_interval_s: seconds between two looks of the backfill scheduler, which alone starts heterogeneous jobs.
        accounting: whether finished jobs can be asked for (slurmdbd).
        kill_wait_s: what a job has between SIGTERM and SIGKILL.
        age_points: what waiting adds to a job's priority, a second of it.
        age_most: the most that waiting adds.
        size_most: what asking for the whole cluster adds.
        signals_preempted: whether a job's own `--signal` comes when preemption's grace begins.
        preempt_type: such as "preempt/partition_prio"; "preempt/none" where nothing is preempted.
    """

    cluster: str
    version: tuple[int, ...]
    partitions: tuple[Partition, ...]
    nodes: tuple[NodeInfo, ...]
    preempt_type: str = "preempt/none"
    preempt_mode: str = "OFF"
    bf_interval_s: int = 30
    accounting: bool = False
    kill_wait_s: int = 30
    signals_preempted: bool = False
    age_points: float = 0.0
    age_most: int = 0
    size_most: int = 0

    def partition(self, name: str | None) -> Partition | None:
        """The partition of this name, or the default one for None; None where there is no such partition."""
        return next(iter(self.partitions_of(name)), None)

    def partitions_of(self, name: str | None) -> tuple[Partition, ...]:
        """The partitions of a list with commas, of which a job gets the one that starts it first; None: the default."""
        names = [] if name is None else name.split(",")
        return tuple(part for part in self.partitions if part.name in names or (name is None and part.default))

    def nodes_of(self, partition: str) -> tuple[NodeInfo, ...]:
        """The nodes of a partition."""
        return tuple(node for node in self.nodes if partition in node.partitions)


class FairShare(msgspec.Struct, frozen=True, kw_only=True):
    """How a user stands under fair-share: `factor` 1 has used nothing yet, 0 has used far more than its share.

    Args:
        share: of the whole that the account is promised, 0 to 1.
        usage: of all that was used lately, the part that the account used, 0 to 1.
    """

    user: str
    account: str
    factor: float | None
    share: float | None = None
    usage: float | None = None


class StepUsage(msgspec.Struct, frozen=True, kw_only=True):
    """One step in accounting: `cpu_s` seconds of CPU time used, of `alloc_cpus` x `elapsed_s`."""

    step: str
    state: JobState
    elapsed_s: int
    alloc_cpus: int
    cpu_s: float


class JobUsage(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a job or component in accounting. `cpu_s` is None while nothing of it has been measured."""

    job_id: str
    leader_id: str
    het_offset: int | None
    partition: str
    state: JobState
    started_at: int | None
    elapsed_s: int
    cpus: int
    gpus: int
    nodes: int
    cpu_s: float | None
    steps: tuple[StepUsage, ...] = ()


class SlurmClient(Protocol):
    """Reads and small commands. Every method raises SlurmUnavailable, or SlurmRefused with Slurm's own words."""

    async def jobs(
        self, ids: Sequence[str] = (), *, name: str | None = None, user: str | None = None, since: float | None = None
    ) -> list[JobInfo]:
        """The jobs of these leader ids with all their components, or of this name, in one batched query.

        A job that nobody knows any more is not in the answer. `user` narrows what the controller has to send, and is
        the caller by default; `since` bounds the look into accounting, whose default begins at midnight.
        """
        ...

    async def cancel(self, ids: Sequence[str], *, pending_only: bool = False) -> None:
        """Cancel jobs, or those of them that have not started; one that has ended or is not known is no error."""
        ...

    async def signal(self, job_id: str, name: str, *, batch_only: bool = False) -> None:
        """Send a signal such as "USR2" to the steps of a job, or to its batch script alone.

        Raises:
            SlurmRefused: it does not run.
        """
        ...

    async def requeue(self, job_id: str) -> None:
        """Queue a job again; of a heterogeneous job only the leader can be.

        Raises:
            SlurmRefused: it is not known, has ended long ago, or may not be queued again.
        """
        ...

    async def site(self) -> SiteInfo:
        """What the cluster is; three queries, so callers keep it."""
        ...

    async def partitions(self) -> tuple[Partition, ...]:
        """The partitions' rules alone, without their nodes' figures; one query."""
        ...

    async def fair_share(self, user: str, account: str | None = None) -> FairShare | None:
        """How a user stands, or None where the site keeps no shares."""
        ...

    async def accounting(self, ids: Sequence[str], since: float) -> list[JobUsage] | None:
        """What all attempts of these jobs used, or None where the site keeps no accounts."""
        ...
