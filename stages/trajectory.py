"""What a rollout leaves: messages, token chains with masks, log-probs and policy versions, and what RUN hands to EVAL.

Frozen records without behaviour: they cross processes and lie on disk. Token streams are packed arrays, as they will
lie in a shard; all per-token arrays of a chain have one length.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call that the assistant asked for; `error` says why its text could not be read as a call."""

    name: str
    arguments: dict[str, Any] = {}
    id: str = ""
    error: str | None = None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation; `finish_reason` (stop, length, abort) stands on sampled ones alone."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    finish_reason: str | None = None


class VersionSpan(msgspec.Struct, frozen=True):
    """Policy `version` sampled the tokens [start, end) of the chain's stream."""

    version: int
    start: int
    end: int


class Turn(msgspec.Struct, frozen=True):
    """One generation: the sampled tokens are [start, end) of the stream; times in seconds.

    `tool_s` is what the tools took after this turn.
    """

    start: int
    end: int
    finish_reason: str
    replica: str
    cached_tokens: int
    llm_s: float
    tool_s: float = 0.0


class Chain(msgspec.Struct, frozen=True):
    """One growing token stream: prompt, then sampled turns (mask 1) and observations (mask 0, log-prob 0.0).

    The streams are packed in the machine's order (little-endian, as the shards): `packed_ids` int32, `packed_mask`
    uint8, `packed_logprobs` float32. They go from the engine's answer to the shard without another list; the
    properties of the columns' names unpack them.
    """

    prompt_length: int
    packed_ids: bytes
    packed_mask: bytes
    packed_logprobs: bytes
    policy_versions: list[VersionSpan]
    turns: list[Turn]

    @classmethod
    def of(
        cls,
        prompt_length: int,
        token_ids: Iterable[int],
        loss_mask: Iterable[int],
        logprobs: Iterable[float],
        policy_versions: Sequence[VersionSpan] = (),
        turns: Sequence[Turn] = (),
    ) -> Chain:
        """A chain of unpacked streams; raises OverflowError or ValueError for a number that does not fit."""
        ids, values = array("i", token_ids).tobytes(), array("f", logprobs).tobytes()
        return cls(prompt_length, ids, bytes(loss_mask), values, list(policy_versions), list(turns))

    @property
    def length(self) -> int:
        """Tokens of the stream."""
        return len(self.packed_ids) // 4

    @property
    def sampled_tokens(self) -> int:
        """Tokens that an engine sampled."""
        return self.packed_mask.count(1)

    @property
    def token_ids(self) -> list[int]:
        """The stream's ids, unpacked anew at each call."""
        return array("i", self.packed_ids).tolist()

    @property
    def loss_mask(self) -> list[int]:
        """1 where a token was sampled, unpacked anew at each call."""
        return list(self.packed_mask)

    @property
    def logprobs(self) -> list[float]:
        """The sampled tokens' log-probs in single precision, unpacked anew at each call."""
        return array("f", self.packed_logprobs).tolist()


class Trajectory(msgspec.Struct, frozen=True):
    """All chains of a rollout and its messages in order. `malformed_calls` counts tool calls that could not be read."""

    chains: list[Chain]
    messages: list[Message]
    logprobs_mode: Literal["processed", "raw"] = "processed"
    malformed_calls: int = 0


class Sampling(msgspec.Struct, frozen=True):
    """Sampling params of a rollout. `max_tokens` bounds one turn; `seed` None lets the engine draw."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    seed: int | None = None


class Timing(msgspec.Struct, frozen=True):
    """Seconds a rollout spent queued and served in each stage; llm_s and tool_s are parts of run_s."""

    queue_init_s: float = 0.0
    init_s: float = 0.0
    queue_run_s: float = 0.0
    run_s: float = 0.0
    llm_s: float = 0.0
    tool_s: float = 0.0
    queue_eval_s: float = 0.0
    eval_s: float = 0.0
    total_s: float = 0.0


class ModelIdentity(msgspec.Struct, frozen=True):
    """Which policy and rendering produced the tokens; the digests are sha256 of the weights' and tokenizer's files."""

    model: str
    model_digest: str = ""
    tokenizer_digest: str = ""
    template_digest: str = ""


class RunResult(msgspec.Struct, frozen=True):
    """The record of one RUN attempt in a handoff segment: what EVAL needs to grade it and to write its row.

    `workspace` is the packed layer (.tar.zst) of the task's declared paths with its digest, or None where the agent
    changed nothing there. `earlier_nodes` are those of the checkpoints that the attempt goes back to.
    """

    rollout_id: str
    group_id: str
    task_id: str
    attempt: int
    outcome: str
    message: str
    trajectory: Trajectory
    sampling: Sampling
    model: ModelIdentity
    node: str
    run_s: float
    llm_s: float
    tool_s: float
    finished_at: float
    workspace_digest: str | None = None
    workspace: bytes | None = None
    earlier_nodes: list[str] = []


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout as it goes into a shard: one shard row a chain (docs/contracts.md: shard columns)."""

    run_id: str
    rollout_id: str
    group_id: str
    task_id: str
    tag: str
    attempt: int
    workflow: str
    task: str
    agent: str
    model: ModelIdentity
    status: str
    failure_class: str | None
    mask_sample: bool
    mask_reason: str | None
    reward: float | None
    reward_parts: dict[str, float]
    grading: Literal["trusted", "untrusted"]
    trajectory: Trajectory
    sampling: Sampling
    timing: Timing
    nodes: list[str]
    slurm_job_id: str | None
    layer_digests: list[str]
    infrastructure_attempts: int
    created_at: float
    finished_at: float
    artifacts: str | None = None


class RowRange(msgspec.Struct, frozen=True):
    """Where bytes lie on the shared filesystem: file (relative to the run directory), offset, length and zlib crc32."""

    path: str
    offset: int
    length: int
    crc32: int


class CheckpointRange(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a checkpoint lies in a handoff segment, and what it holds: turns, sampled tokens, their oldest version."""

    path: str
    offset: int
    length: int
    crc32: int
    turns: int = 0
    tokens: int = 0
    min_policy_version: int | None = None
