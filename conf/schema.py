"""Every key of a run's configuration: type, default, range and one sentence each (its machines: components.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from conf.components import (
    Autoscale,
    Cluster,
    Control,
    EvalPool,
    Fleet,
    FleetName,
    InitPool,
    Placement,
    PlacementName,
    Pool,
    Pools,
    RunPool,
    Sandbox,
    SandboxName,
)
from conf.limits import Count, CountOrZero, Label, Line, Name, Priority, Range, Seconds, Seed, Share, Temperature
from conf.training import Heldout, Train

__all__ = [
    "Action",
    "Admission",
    "Agent",
    "Autoscale",
    "Budget",
    "Callbacks",
    "Checkpoint",
    "Cluster",
    "Compat",
    "Config",
    "Control",
    "EvalPool",
    "Evaluate",
    "Fleet",
    "FleetName",
    "Heldout",
    "InitPool",
    "Lease",
    "Placement",
    "PlacementName",
    "PolicyRules",
    "Pool",
    "Pools",
    "Retry",
    "RunPool",
    "Sampling",
    "Sandbox",
    "SandboxName",
    "Shards",
    "SharedFilesystem",
    "Task",
    "Train",
    "Workflow",
    "WorkflowName",
]

Action = Literal["run", "submit", "plan"]
WorkflowName = Literal["collect", "serve", "evaluate", "train"]


@dataclass(frozen=True, kw_only=True)
class Workflow:
    """What the run is for."""

    name: WorkflowName = "collect"
    """collect: roll a data set out into shards; serve: wait for a trainer; evaluate: measure; train: learn."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The data set, its environments and its verifier."""

    _target_: Name = "workflows.tasks.arith.ArithTask"
    """Import path of the Task class; yours works too, if it can be imported."""
    name: Label = "arith"
    """Name in run directories and in the shards' task column."""
    path: Line | None = None
    """Data file or directory of the task; null: the task's own data."""
    limit: Count | None = 64
    """Rows used at most; null: all."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the Task class, by name; keys that it does not list yet are added with a plus sign."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """The program that turns model answers into actions."""

    _target_: Name = "workflows.agents.tools.ToolsAgent"
    """Import path of the Agent class; yours works too, if it can be imported."""
    name: Label = "tools"
    """Name in run directories and in the shards' agent column."""
    max_turns: Count = 8
    """Model answers of one attempt at most; more are a policy time-out with reward 0."""
    turn_timeout_s: Seconds = 30.0
    """Seconds that one tool call may take before it is interrupted."""
    harness: Line | None = None
    """Preset of agent=harness; null for the others."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the Agent class, by name; keys that it does not list yet are added with a plus sign."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; a trainer's request may say otherwise for its own rollouts."""

    temperature: Temperature = 1.0
    """0 is greedy."""
    top_p: Share = 1.0
    """Nucleus: the smallest set of tokens with this probability; 1: all."""
    max_tokens: Count = 96
    """Tokens of one model answer at most."""
    seed: Seed | None = None
    """Seed of the draws; null: derived from the run's seed, the rollout and the turn."""
    logprobs: Literal["processed", "raw"] = "processed"
    """processed: of the distribution that was sampled from; raw: before temperature and top_p."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Service time of one attempt a stage; waiting in a queue does not count."""

    init_s: Seconds = 600.0
    """Seconds to prepare an environment."""
    run_s: Seconds = 600.0
    """Seconds of an agent's work."""
    eval_s: Seconds = 600.0
    """Seconds to grade."""


@dataclass(frozen=True, kw_only=True)
class Retry:
    """What happens after a fault of the infrastructure."""

    max_attempts: Count = 3
    """Attempts of one rollout, the first included."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """How long a worker holds its rollouts without a word."""

    ttl_s: Seconds = 30.0
    """Seconds after the last heartbeat until its rollouts are given to others."""
    heartbeat_s: Seconds = 5.0
    """Seconds between heartbeats; below half of lease.ttl_s, so that one may be lost."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What the router accepts."""

    max_open: Count = 4096
    """Rollouts that are accepted and not ended; above it, 429."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving a rollout in the middle."""

    turns: CountOrZero | None = None
    """A checkpoint every so many turns; 0: at a drain only; null: 1 where Slurm may preempt the RUN pool, else 0."""


@dataclass(frozen=True, kw_only=True)
class SharedFilesystem:
    """What the run directory's filesystem may do to us."""

    visibility_s: Seconds = 60.0
    """Seconds that another node's write may take to become visible."""


@dataclass(frozen=True, kw_only=True)
class PolicyRules:
    """Staleness of what is collected."""

    max_lag: CountOrZero | None = None
    """Policy versions that a trajectory may be behind; null: any."""


@dataclass(frozen=True, kw_only=True)
class Compat:
    """Routes that other systems' clients speak."""

    prorl: bool = False
    """Offer the ProRL Agent routes."""
    nemo_gym: bool = False
    """Offer NeMo Gym's agent route."""


@dataclass(frozen=True, kw_only=True)
class Shards:
    """What goes into the shards beside the tokens."""

    messages: bool = True
    """Keep the messages as JSON for people; false saves the space."""


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Calls to a trainer's own server."""

    allow: list[Name] = field(default_factory=list)
    """URL prefixes that callbacks may go to; empty: none."""


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """workflow=evaluate."""

    run_dir: Line | None = None
    """Run whose fleet is measured; null: a fleet of its own."""
    k: Count = 1
    """Rollouts a task."""
    priority: Priority = 50
    """Priority among that run's rollouts."""
    tag: Line = "evaluate"
    """Tag of the evaluation's rows."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration of one run, resolved: what config.yaml in the run directory holds."""

    workflow: Workflow = field(default_factory=Workflow)
    """What the run is for."""
    task: Task = field(default_factory=Task)
    """The data set, its environments and its verifier."""
    agent: Agent = field(default_factory=Agent)
    """The program that turns model answers into actions."""
    fleet: Fleet = field(default_factory=Fleet)
    """The engines that serve the policy."""
    sandbox: Sandbox = field(default_factory=Sandbox)
    """What isolates an agent's commands."""
    placement: Placement = field(default_factory=Placement)
    """Where the processes run."""
    cluster: Cluster = field(default_factory=Cluster)
    """What a Slurm site wants to hear."""
    action: Action | None = None
    """run: wait for the end; submit: return; plan: print, start nothing; null: run for placement=local, else submit."""
    run_dir: Line | None = None
    """Run directory; null: runs/<workflow>-<task>-<date>-<time>-<4 hex digits>."""
    store: Line | None = None
    """Layers and images, shared by runs; null: store beside the run directory."""
    seed: Seed = 0
    """Seed of everything that is drawn."""
    group_size: Annotated[int, Range(low=1, high=65536)] = 4
    """Rollouts of each task."""
    tag: Line = ""
    """Label of the run's rows."""
    import_path: list[Name] = field(default_factory=list)
    """Directories of your own packages, searched last by every process; found by itself for task and agent."""
    pools: Pools = field(default_factory=Pools)
    """The three pools of workers."""
    control: Control = field(default_factory=Control)
    """The router's component."""
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are drawn."""
    budget: Budget = field(default_factory=Budget)
    """Service time of one attempt a stage."""
    retry: Retry = field(default_factory=Retry)
    """What happens after a fault of the infrastructure."""
    lease: Lease = field(default_factory=Lease)
    """How long a worker holds its rollouts without a word."""
    admission: Admission = field(default_factory=Admission)
    """What the router accepts."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """Saving a rollout in the middle."""
    fs: SharedFilesystem = field(default_factory=SharedFilesystem)
    """What the run directory's filesystem may do to us."""
    policy: PolicyRules = field(default_factory=PolicyRules)
    """Staleness of what is collected."""
    stuck_after_s: Seconds = 600.0
    """Seconds without any progress after which the run ends and says what it waited for."""
    compat: Compat = field(default_factory=Compat)
    """Routes that other systems' clients speak."""
    shards: Shards = field(default_factory=Shards)
    """What goes into the shards beside the tokens."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    """Calls to a trainer's own server."""
    evaluate: Evaluate = field(default_factory=Evaluate)
    """workflow=evaluate."""
    train: Train = field(default_factory=Train)
    """workflow=train."""

    @property
    def run_path(self) -> Path:
        """The run directory, absolute.

        Raises:
            ValueError: the configuration was not resolved, so it has none yet.
        """
        if not self.run_dir:
            raise ValueError("run_dir is not set: only a resolved configuration has a run directory")
        return Path(self.run_dir).absolute()

    @property
    def store_path(self) -> Path:
        """Where layers and images are: `store`, or `store` beside the run directory."""
        return Path(self.store).absolute() if self.store else self.run_path.parent / "store"
