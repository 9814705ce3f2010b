"""The bodies of the router's HTTP API as both sides read and write them. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from stages.trajectory import CheckpointRange, RowRange, Sampling

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What reading JSON that somebody else wrote may raise: also text that is none, and nesting without an end."""

PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
"""At most what an int32 column of the shards can say."""
MemberId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
Number = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}$")]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
Stage = Literal["init", "run", "eval"]


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Base of requests."""


class TaskIn(_Request, frozen=True):
    """One task of a submission; without `data` the served data's row of that id is taken."""

    task_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    data: dict[str, Any] | None = None


class SamplingIn(_Request, frozen=True):
    """What a submission changes of the configured sampling params."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Fraction | None = None
    max_tokens: PositiveInt | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None

    def over(self, base: Sampling) -> Sampling:
        """The configured params with these on top."""
        return msgspec.structs.replace(base, **{k: v for k, v in msgspec.structs.asdict(self).items() if v is not None})


class PolicyBound(_Request, frozen=True):
    """How many policy versions a trajectory may be behind."""

    max_lag: Annotated[int, msgspec.Meta(ge=0)] | None = None


class RolloutsIn(_Request, frozen=True):
    """POST /v1/rollouts."""

    tasks: Annotated[list[TaskIn], msgspec.Meta(min_length=1)]
    group_size: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 1
    tag: Annotated[str, msgspec.Meta(max_length=256)] = ""
    sampling: SamplingIn | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=100)] = 50
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    min_usable: PositiveInt | None = None
    policy: PolicyBound | None = None
    callback_url: Annotated[str, msgspec.Meta(max_length=2048)] | None = None


class GroupOut(msgspec.Struct, frozen=True):
    """One accepted task."""

    group_id: str
    task_id: str
    rollout_ids: list[str]


class RolloutsOut(msgspec.Struct, frozen=True):
    """Answer to POST /v1/rollouts."""

    groups: list[GroupOut]


class PolicyIn(_Request, frozen=True):
    """POST /v1/policy. With `adapter`, `weights_path` is a LoRA of that name, not a whole model."""

    version: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    weights_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)] | None = None
    mode: Literal["keep", "wait", "abort"] = "keep"
    adapter: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")] | None = None


class ReplicaIn(_Request, frozen=True):
    """POST /v1/replicas. `id` is the member that serves it; without one the router makes it from the URL."""

    url: Annotated[
        str, msgspec.Meta(pattern=r"^https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?(/[!-~]*)?$")
    ]
    model: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    capacity: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 64
    id: MemberId | None = None


class SessionIn(_Request, frozen=True):
    """POST /v1/sessions. `failed` names a replica that has just not answered: it is probed at once."""

    rollout_id: str
    attempt: int
    failed: str | None = None


class SessionOut(msgspec.Struct, frozen=True):
    """Where an attempt generates.

    `once`: ask again before the next generation. `ask_again_s`: without a word for so long the session is taken for
    over. `adapter`: the model to name in requests, where the policy is a LoRA.
    """

    session_id: str
    replica_id: str
    replica_url: str
    policy_version: int
    once: bool = False
    ask_again_s: float = 300.0
    adapter: str | None = None


class LeaseIn(_Request, frozen=True):
    """POST /v1/lease."""

    member: MemberId
    epoch: int
    stage: Stage
    free: Annotated[int, msgspec.Meta(ge=0)]
    warm: list[str] = []
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class LeaseOut(msgspec.Struct, frozen=True):
    """One lease; `input` is one of the *Input records below, by stage."""

    lease_id: str
    rollout_id: str
    attempt: int
    stage: Stage
    expires_in_s: float
    input: msgspec.Raw


class LeasesOut(msgspec.Struct, frozen=True):
    """Answer to POST /v1/lease."""

    epoch: int
    leases: list[LeaseOut]


class EnvironmentOut(msgspec.Struct, frozen=True):
    """An INIT lease's environment, with the key that names its layer in the store."""

    key: str
    image: str
    setup_key: str


class InitInput(msgspec.Struct, frozen=True):
    """INIT: public columns of one row of the environment."""

    environment: EnvironmentOut
    payload: dict[str, Any]
    budget_s: float


class RunInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """RUN: public columns (all of them for the oracle alone), layers lowest first, sampling params, service seconds.

    `checkpoint` is where an earlier attempt stopped, if one did; `session` where this one generates, if a replica was
    ready.
    """

    payload: dict[str, Any]
    layers: list[str]
    sampling: Sampling
    budget: float
    group_id: str
    task_id: str
    tag: str
    checkpoint: CheckpointRange | None = None
    session: SessionOut | None = None


class EvalInput(msgspec.Struct, frozen=True):
    """EVAL: all columns, layers, RUN's segment, and what the row says of the rollout's way so far (seconds)."""

    payload: dict[str, Any]
    layers: list[str]
    segment: RowRange
    budget: float
    group_id: str
    task_id: str
    tag: str
    outcome: str
    message: str
    infrastructure_attempts: int
    created_at: float
    queue_init_s: float
    init_s: float
    queue_run_s: float
    queue_eval_s: float


class HeartbeatIn(_Request, frozen=True):
    """POST /v1/heartbeat: one a worker. `load` is for people: slots, busy, loop lag."""

    member: MemberId
    epoch: int
    leases: list[Number]
    load: dict[str, Any] = {}


class Revoked(msgspec.Struct, frozen=True):
    """A lease that is the member's no longer."""

    lease_id: str
    reason: str


class HeartbeatOut(msgspec.Struct, frozen=True):
    """Answer to POST /v1/heartbeat.

    `moved` names rollouts that are to ask for their session again before the next turn; `lost` those whose replica is
    down, so that its answer is not worth waiting for.
    """

    epoch: int
    renewed: list[str]
    revoked: list[Revoked]
    drain: bool
    policy_version: int
    moved: list[str] = []
    lost: list[str] = []


class CommitRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """EVAL's row range and what the index says of the row."""

    path: str
    offset: int
    length: int
    crc32: int
    reward: float | None = None
    min_policy_version: int | None = None
    chains: int = 1
    tokens: int = 0


class CommitTiming(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds of service; llm_s and tool_s are parts of it."""

    service_s: float = 0.0
    llm_s: float = 0.0
    tool_s: float = 0.0


class CommitIn(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One finished lease; or, with the outcome `checkpoint`, one that goes on and could be taken up from there.

    `wasted_tokens` were sampled under the lease and are kept by nothing.
    """

    lease_id: Number
    rollout_id: str
    attempt: int
    outcome: str
    final: bool = False
    message: str = ""
    layer: str | None = None
    cached: bool = False
    segment: RowRange | None = None
    min_policy_version: int | None = None
    row: CommitRow | None = None
    checkpoint: CheckpointRange | None = None
    wasted_tokens: int = 0
    timing: CommitTiming = CommitTiming()


class CommitsIn(_Request, frozen=True):
    """POST /v1/commit."""

    member: MemberId
    epoch: int
    commits: list[CommitIn]


class CommitResult(msgspec.Struct, frozen=True):
    """What became of one commit."""

    lease_id: str
    status: Literal["ok", "already", "superseded"]


class CommitsOut(msgspec.Struct, frozen=True):
    """Answer to POST /v1/commit."""

    results: list[CommitResult]
