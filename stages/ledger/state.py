"""What the ledger remembers while work is open: rollouts, groups, environments, leases, members. Plain records."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from stages.ledger.events import CommitItem, Rules
from stages.ledger.fleet import Fleet
from stages.ledger.queues import PriorityQueue
from stages.trajectory import CheckpointRange, RowRange, Sampling

INIT, RUN, EVAL = "init", "run", "eval"
STAGES = (INIT, RUN, EVAL)
QUEUED, LEASED = "queued", "leased"
Closing = Literal["complete", "min_usable", "deadline", "cancelled"]


class Rollout(msgspec.Struct):
    """One open attempt slot. Times are the router's clock; `*_s` are seconds summed over attempts' last run.

    Attributes:
        order: acceptance order, kept over retries, so that priorities stay stable inside.
        attempt: how many times RUN has been leased for it (the current one included).
        failures: infrastructure faults so far, and `losses` leases lost with their workers.
        held: its environment is ready but the ready buffer was full.
        checkpoint: the newest one, made by attempt `checkpoint_attempt`; the next RUN lease goes on from it.
        graded: EVAL's result, while the rollout waits for its group (see lag.py); it is then in no queue.
    """

    id: str
    group: str
    order: int
    accepted_at: float
    queued_at: float
    stage: str = INIT
    state: str = QUEUED
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    tries: int = 0
    lease: int = 0
    outcome: str = "ok"
    message: str = ""
    segment: RowRange | None = None
    min_policy_version: int | None = None
    held: bool = False
    graded: CommitItem | None = None
    checkpoint: CheckpointRange | None = None
    checkpoint_attempt: int = 0
    queue_init_s: float = 0.0
    init_s: float = 0.0
    queue_run_s: float = 0.0
    run_s: float = 0.0
    llm_s: float = 0.0
    tool_s: float = 0.0
    queue_eval_s: float = 0.0


class Group(msgspec.Struct):
    """n rollouts of one task; leaves memory when all have ended and its line is out."""

    id: str
    task_id: str
    payload: str
    environment: str
    tag: str
    priority: int
    accepted_at: float
    rollouts: list[str]
    open: int
    sampling: Sampling | None = None
    deadline: float | None = None
    min_usable: int | None = None
    max_lag: int | None = None
    callback_url: str | None = None
    usable: int = 0
    closing: Closing = "complete"


class EnvironmentState(msgspec.Struct):
    """One INIT layer: who waits for it, or its digest once it is ready."""

    key: str
    order: int
    payload: str
    waiting: dict[str, None] = {}
    layer: str | None = None
    lease: int = 0
    tries: int = 0
    losses: int = 0


class Callback(msgspec.Struct):
    """A closed group that its trainer has not been told of yet; `seq` is its index line's, `since` when it closed."""

    url: str
    seq: int
    since: float


class Lease(msgspec.Struct):
    """Work in a member's hands. `work` is an environment key for INIT, else a rollout id."""

    id: int
    member: str
    stage: str
    work: str
    granted_at: float
    expires_at: float
    attempt: int


class Counts(msgspec.Struct):
    """Totals over the run's life; open = accepted - completed - failed - cancelled."""

    accepted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    groups_accepted: int = 0
    groups_closed: int = 0
    init_prepared: int = 0
    init_cached: int = 0
    retries: int = 0
    reward_sum: float = 0.0
    reward_n: int = 0
    tokens: int = 0
    infra_failures: int = 0
    attempts_ended: int = 0
    checkpoints: int = 0
    wasted_tokens: int = 0
    by_class: Counter[str] = msgspec.field(default_factory=Counter)


class State(msgspec.Struct):
    """The whole ledger. Queues and heaps can be rebuilt from the rest; everything else is journaled truth."""

    rules: Rules = msgspec.field(default_factory=Rules)
    run_id: str = ""
    epoch: int = 0
    now: float = 0.0
    seq: int = 0
    next_group: int = 1
    next_order: int = 1
    next_lease: int = 1
    draining: bool = False
    policy_version: int = 0
    rollouts: dict[str, Rollout] = {}
    groups: dict[str, Group] = {}
    environments: dict[str, EnvironmentState] = {}
    leases: dict[int, Lease] = {}
    members: dict[str, dict[int, None]] = {}
    committed: dict[int, None] = {}
    keys: dict[str, tuple[str, list[str]]] = {}
    segments: Counter[str] = msgspec.field(default_factory=Counter)
    superseded: dict[str, None] = {}
    callbacks: dict[str, Callback] = {}
    counts: Counts = msgspec.field(default_factory=Counts)
    fleet: Fleet = msgspec.field(default_factory=Fleet)
    delayed: list[tuple[float, int, str, str]] = []
    last_progress: float = 0.0


class Queues:
    """What is ready to be leased, a queue a stage, and the rollouts held back by the ready buffer."""

    def __init__(self) -> None:
        self.by_stage = {stage: PriorityQueue() for stage in STAGES}
        self.held = PriorityQueue()
