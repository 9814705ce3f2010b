"""The keys that say where processes run: fleet, sandbox, placement, cluster, pools, control."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from conf.limits import Count, CountOrZero, Gib, Line, Name, Range, Seconds, SecondsOrZero, Share

FleetName = Literal["embedded", "vllm", "external"]
SandboxName = Literal["auto", "apptainer", "bubblewrap", "none"]
PlacementName = Literal["local", "colocated", "het", "linked", "auto"]


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The engines that serve the policy."""

    name: FleetName = "embedded"
    """embedded: the NumPy engine; vllm: vLLM servers; external: servers that run already, by fleet.urls."""
    model: Name = "tiny"
    """Shipped policy (tiny, tiny-half) or a Hugging Face model directory."""
    replicas: Count = 1
    """Engine processes that serve the same model."""
    gpus_per_replica: CountOrZero = 0
    """GPUs that one replica spans; 0: CPU only."""
    urls: list[Name] = field(default_factory=list)
    """Base URLs of engines that are not ours to start (fleet=external)."""
    policy: Literal["sticky", "round_robin", "prefix_hash"] = "sticky"
    """How sessions are assigned to replicas; the last two are for comparison."""
    kv_gate: Share = 0.9
    """Share of a replica's KV cache in use above which it gets no new sessions; 1: it is never looked at."""
    move_above: Annotated[float, Range(low=0, high=1000)] = 0.0
    """A replica with so many times its share of sessions, or over fleet.kv_gate, gives some to others; 0: never."""
    sync: Literal["together", "rolling"] = "together"
    """New weights onto all replicas at once, or onto one after the other while the others serve."""
    python: Line | None = None
    """Interpreter that has vLLM (fleet=vllm); null: .venv-vllm beside this installation, else this one."""
    start_s: Seconds = 900.0
    """Time that a vLLM server may take until it serves (fleet=vllm)."""
    extra_args: list[Line] = field(default_factory=list)
    """More flags of each vLLM server, one word each: [--max-model-len, "8192"] (fleet=vllm)."""
    nodes: Count = 1
    """Nodes of the fleet's component on a cluster."""
    partition: Line | None = None
    """Slurm partition of the fleet; null: cluster.partition."""
    account: Line | None = None
    """Slurm account of the fleet; null: cluster.account."""
    qos: Line | None = None
    """Slurm quality of service of the fleet; null: cluster.qos."""
    cpus_per_task: Count = 1
    """CPU cores of one replica on a cluster."""
    mem_gib: Gib | None = None
    """Memory of one replica on a cluster, GiB; null: the site's default."""
    time_min: Count | None = None
    """Time limit of the fleet's job, minutes; null: the partition's default."""


@dataclass(frozen=True, kw_only=True)
class SandboxBounds:
    """What one sandbox may use; one that uses more is ended, and its rollout by its agent's doing."""

    cpu_s: Seconds | None = None
    """CPU seconds of all its processes; null: unbounded."""
    memory_mib: Count | None = 8192
    """Memory in use by all its processes, MiB; null: unbounded."""
    processes: Count | None = 4096
    """Processes and threads at once; null: unbounded."""
    disk_mib: Count | None = 16384
    """What it has written and not removed, MiB; null: unbounded."""
    files: Count | None = 500_000
    """Names that it has made and not removed; null: unbounded."""
    file_mib: Count | None = None
    """One file, MiB; null: as large as disk_mib allows."""
    open_files: Count | None = 8192
    """Descriptors of one process; null: as many as the worker may have."""
    wall_s: Seconds | None = None
    """Seconds from its start; null: the budget of the attempt alone."""


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """What isolates an agent's commands."""

    name: SandboxName = "auto"
    """auto: the fastest backend that passes the isolation probe; none: no isolation at all."""
    limits: SandboxBounds = field(default_factory=SandboxBounds)
    """What one sandbox may use."""
    node_gib: Gib | None = None
    """Most GiB of unpacked images and layers that a node keeps, the least recently used leave; null: half its disk."""
    unpack_slots: Count = 8
    """Nodes that unpack from the store at once when many start together; the others wait, a minute at most."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the processes run."""

    name: PlacementName = "local"
    """local: here; colocated: every node runs all pools; het: one heterogeneous job; linked: a job a pool; auto."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a Slurm site wants to hear; null leaves the site's default."""

    name: Name = "generic"
    """Name of the site."""
    account: Line | None = None
    """Account that is charged."""
    qos: Line | None = None
    """Quality of service."""
    partition: Line | None = None
    """Partition of every component that names none itself."""
    constraint: Line | None = None
    """Node features that are asked for."""
    reservation: Line | None = None
    """Reservation to run in."""
    exclude: list[Name] = field(default_factory=list)
    """Nodes never to be used."""
    nice: int | None = None
    """Slurm's nice value of the jobs."""
    clusters: list[Name] = field(default_factory=list)
    """Clusters of a multi-cluster site to submit to."""
    setup: list[Name] = field(default_factory=list)
    """Shell lines before the processes start, such as module loads."""
    scratch: Line | None = None
    """Node-local directory for sandboxes and images; null: TMPDIR, else /tmp."""
    interface: Line | None = None
    """Network interface that the nodes reach each other by; null: the host name's address."""
    continue_by: Literal["requeue", "resubmit", "none"] = "requeue"
    """How a run goes on after its time limit or a preemption."""
    max_requeues: CountOrZero = 10
    """Times that a run may go on in this way."""
    het_max_nodes: Count = 64
    """Nodes above which placement=auto takes linked jobs."""
    het_max_pending_s: SecondsOrZero = 3600.0
    """Seconds that a heterogeneous job may wait before placement=auto takes linked jobs."""
    max_submissions_per_hour: Count = 20
    """Jobs that one run may submit in an hour."""
    changed_code: Literal["record", "refuse"] = "record"
    """What a job does that starts with other code than it was submitted with: note it in its result, or not run."""
    shapes: list[dict[str, Any]] = field(default_factory=list)
    """Alternative sets of keys, ranked by their estimated start."""
    extra_sbatch: list[Name] = field(default_factory=list)
    """Further #SBATCH options, each as one would write it on sbatch's command line."""


@dataclass(frozen=True, kw_only=True)
class Autoscale:
    """How a pool grows and shrinks with its queue."""

    max: CountOrZero = 0
    """Workers that may be added; 0: none."""
    queue: Count = 64
    """Queued rollouts a worker above which one more is submitted."""
    idle_s: Seconds = 300.0
    """Seconds without a lease after which an added worker is drained."""
    partition: Line | None = None
    """Partition of added workers; null: the pool's."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Workers of one stage."""

    workers: Count = 1
    """Processes; on a cluster, processes a node."""
    slots: Count = 4
    """Rollouts that one worker holds at once."""
    nodes: Count = 1
    """Nodes on a cluster."""
    cpus_per_task: Count = 1
    """CPU cores of one worker on a cluster."""
    mem_gib: Gib | None = None
    """Memory of one worker on a cluster, GiB; null: the site's default."""
    partition: Line | None = None
    """Slurm partition; null: cluster.partition."""
    account: Line | None = None
    """Slurm account; null: cluster.account."""
    qos: Line | None = None
    """Slurm quality of service; null: cluster.qos."""
    time_min: Count | None = None
    """Time limit, minutes; null: the partition's default."""


@dataclass(frozen=True, kw_only=True)
class InitPool(Pool):
    """Workers of INIT, which make environments' layers."""

    ready_buffer: Count = 256
    """Prepared rollouts that may wait for RUN before INIT pauses."""


@dataclass(frozen=True, kw_only=True)
class RunPool(Pool):
    """Workers of RUN, which hold the agents."""

    slots: Count = 32
    """Rollouts that one worker holds at once."""
    steer: bool = True
    """Hold fewer rollouts while engines preempt requests, and more again when they have room."""
    autoscale: Autoscale = field(default_factory=Autoscale)
    """Growth with the queue."""


@dataclass(frozen=True, kw_only=True)
class EvalPool(Pool):
    """Workers of EVAL, which grade."""

    slots: Count = 8
    """Rollouts that one worker holds at once."""


@dataclass(frozen=True, kw_only=True)
class Pools:
    """The three pools of workers."""

    init: InitPool = field(default_factory=InitPool)
    """Makes environments."""
    run: RunPool = field(default_factory=RunPool)
    """Runs agents."""
    eval: EvalPool = field(default_factory=EvalPool)
    """Grades."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """The router's component."""

    partition: Line | None = None
    """Slurm partition; null: cluster.partition."""
    cpus_per_task: Count = 1
    """CPU cores on a cluster."""
    mem_gib: Gib | None = None
    """Memory on a cluster, GiB; null: the site's default."""
