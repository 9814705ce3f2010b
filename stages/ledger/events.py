"""The events of the ledger: everything that ever changes it, as journaled, one frozen record each.

Every event carries `t`, the router's clock in seconds since the Unix epoch, which never runs backwards within a run.
What the router decides freely (which rollouts to lease, which replica to assign) stands in the event as decided, so
replay never depends on a policy's code; what follows (retry, group rules, sequence numbers) is computed by the machine.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stages.trajectory import CheckpointRange, RowRange, Sampling


class Event(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True, kw_only=True):
    """Base of all events."""

    t: float


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A journal file as history knows it: replay reads exactly `length` bytes; `crc` is its last line's."""

    epoch: int
    part: int
    length: int
    crc: str


class Rules(msgspec.Struct, frozen=True, omit_defaults=True):
    """The configured numbers that the machine decides by; journaled with each epoch, so replay needs no config."""

    lease_ttl_s: float = 30.0
    max_attempts: int = 3
    ready_buffer: int = 256
    max_lag: int | None = None
    session_idle_s: float = 600.0


class EpochBegan(Event, frozen=True, tag="epoch"):
    """First record of an epoch: seals all of `history`; lines beyond those lengths do not exist."""

    epoch: int
    run_id: str
    history: list[Part]
    rules: Rules
    node: str = ""


class PartBegan(Event, frozen=True, tag="part"):
    """First record of a later part of an epoch; names the good lengths of the epoch's parts before it."""

    epoch: int
    part: int
    before: list[Part]


class GroupSpec(msgspec.Struct, frozen=True, array_like=True):
    """One task of a submission: its group, its row (a digest in journal/payloads) and the environment it needs."""

    group_id: str
    task_id: str
    payload: str
    environment: str


class Submitted(Event, frozen=True, tag="submit"):
    """Tasks accepted: `n` rollouts each, ids `<group_id>-<i>`."""

    groups: list[GroupSpec]
    n: int
    tag: str = ""
    priority: int = 50
    sampling: Sampling | None = None
    deadline_s: float | None = None
    min_usable: int | None = None
    max_lag: int | None = None
    callback_url: str | None = None
    key: str | None = None
    body_digest: str | None = None


class Leased(Event, frozen=True, tag="lease"):
    """Work handed to a member: environment keys for INIT, rollout ids for RUN and EVAL."""

    member: str
    stage: str
    work: list[str]


class Heartbeat(Event, frozen=True, tag="beat"):
    """A member's leases renewed; those of its leases not listed run out one ttl after their last renewal."""

    member: str
    leases: list[int]


class CommitItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished lease. INIT brings `layer`, RUN `segment`, EVAL `row` with what the index says of it.

    The outcome `checkpoint` does not finish it; `given_back` may bring a `checkpoint` too.

    `final` says of a fault that trying again would meet it again.
    """

    lease: int
    outcome: str
    final: bool = False
    message: str = ""
    layer: str | None = None
    cached: bool = False
    segment: RowRange | None = None
    row: RowRange | None = None
    reward: float | None = None
    min_policy_version: int | None = None
    chains: int = 0
    tokens: int = 0
    service_s: float = 0.0
    llm_s: float = 0.0
    tool_s: float = 0.0
    checkpoint: CheckpointRange | None = None
    wasted_tokens: int = 0


class Committed(Event, frozen=True, tag="commit"):
    """Results of a member's leases."""

    member: str
    commits: list[CommitItem]


class CalledBack(Event, frozen=True, tag="callback"):
    """Callbacks that are over: delivered, or given up (`failed` says why, by group)."""

    groups: list[str]
    failed: dict[str, str] = {}


class MemberGone(Event, frozen=True, tag="gone"):
    """A member is known to be dead: its leases are free at once."""

    member: str
    reason: str = ""


class Cancelled(Event, frozen=True, tag="cancel"):
    """Rollouts and whole groups to be ended as cancelled."""

    rollouts: list[str] = []
    groups: list[str] = []
    reason: str = "asked"


class Tick(Event, frozen=True, tag="tick"):
    """Time alone: leases and deadlines that are due, back-offs that are over. `gap_s` is added to every lease first."""

    gap_s: float = 0.0


class Draining(Event, frozen=True, tag="drain"):
    """The run stops (or resumes) handing out work."""

    on: bool = True


class PolicyIntended(Event, frozen=True, tag="policy_intent"):
    """The fleet is about to load a version; PolicyChanged is its outcome. Found without one, it is done again."""

    version: int
    weights_path: str | None = None
    mode: str = "keep"
    adapter: str | None = None


class PolicyChanged(Event, frozen=True, tag="policy"):
    """The trainer's policy version from here on; `failed` names the replicas that could not load it, and why."""

    version: int
    weights_path: str | None = None
    mode: str = "keep"
    adapter: str | None = None
    failed: dict[str, str] = {}


class ReplicaChanged(Event, frozen=True, tag="replica"):
    """A replica joined (`url` given), changed health, drains or left; `version` is the policy that it serves."""

    replica: str
    change: str
    url: str = ""
    model: str = ""
    capacity: int = 64
    reason: str = ""
    version: int | None = None


class SessionOpened(Event, frozen=True, tag="session"):
    """A rollout's attempt assigned to a replica."""

    rollout_id: str
    attempt: int
    replica: str


class SessionClosed(Event, frozen=True, tag="session_end"):
    """A session released before its rollout left RUN."""

    session: int


AnyEvent = (
    EpochBegan
    | PartBegan
    | Submitted
    | Leased
    | Heartbeat
    | Committed
    | MemberGone
    | CalledBack
    | Cancelled
    | Tick
    | Draining
    | PolicyIntended
    | PolicyChanged
    | ReplicaChanged
    | SessionOpened
    | SessionClosed
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(event: AnyEvent) -> bytes:
    """An event as one line of JSON, without its newline."""
    return _encoder.encode(event)


def decode(data: bytes | memoryview) -> AnyEvent:
    """The event of a journal line.

    Raises:
        msgspec.MsgspecError: not an event of this version.
    """
    return _decoder.decode(data)


def as_dict(event: AnyEvent) -> dict[str, Any]:
    """For people: `rollmill journal` prints this."""
    result: dict[str, Any] = msgspec.to_builtins(event)
    return result
