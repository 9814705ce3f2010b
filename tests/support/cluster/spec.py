"""What a test cluster looks like: nodes, partitions, accounts and the knobs of its controller, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field

NAME = "mill"
"""The cluster's name in Slurm and in its accounting."""
QUICK = (
    "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_yield_interval=100000,bf_hetjob_immediate,bf_continue"
)
"""Scheduler parameters that start a job as soon as it can; `bf_interval` comes beside them."""


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """One cluster; every node is a slurmd of this machine, and its CPUs and GPUs are what is declared here."""

    cpu_nodes: int = 5
    gpu_nodes: int = 2
    cpus: int = 8
    memory_mib: int = 16_000
    gpus: int = 2
    """GPUs of a gpu node: names for /dev/null."""
    users: dict[str, str] = field(default_factory=lambda: {"alice": "physics", "bob": "biology"})
    """User of this machine (made when missing) -> account."""
    accounting: bool = True
    """Without it there is no database, no accounts and no sacct, and the cluster is up two seconds sooner."""
    min_job_age_s: int = 600
    """How long squeue shows an ended job."""
    bf_interval_s: int = 1
    """How often the backfill loop looks; only it starts a het job. Slurm's default is 30."""
    scheduler: str = QUICK
    """SchedulerParameters, but for bf_interval."""
    controller: str = ""
    """Further SlurmctldParameters."""
    rate_limit: str = ""
    """Slurm >= 23.02: `rl_bucket_size=40,rl_refill_rate=4` refuses a user's calls beyond that; empty: no limit."""
    grace_s: int = 5
    """GraceTime of the partition `preempt`."""
    preempt_mode: str = "REQUEUE"
    """What becomes of a job that is preempted in it: REQUEUE or CANCEL."""
    signal_preempted: bool = True
    """Whether a job's own `--signal` comes at preemption too; else its steps alone get TERM when the grace begins."""
    kill_wait_s: int = 3
    slurmd_timeout_s: int = 10
    """How long a node may be silent before it is down (Slurm looks at it in turns: 25 s were seen)."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes, cpu nodes first."""
        cpu = [f"cpu{number}" for number in range(1, self.cpu_nodes + 1)]
        return (*cpu, *(f"gpu{number}" for number in range(1, self.gpu_nodes + 1)))
