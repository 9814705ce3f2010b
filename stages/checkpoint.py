"""The record of a rollout that stopped between two turns: all that another worker needs to go on from there."""

from __future__ import annotations

from typing import Any

import msgspec

from sandbox.protocols import ShellState
from stages.trajectory import Chain, Message


class StreamState(msgspec.Struct, frozen=True):
    """A model's side of an attempt.

    Args:
        chains: all chains; the last one is the one that goes on.
        conversation: the messages that the last chain stands for, its last reply included.
        tools: schemas that stand in its prompt.
        transcript: all messages in order.
        history: what the agent goes on from: the messages that it asked with, or those and the reply.
        asked: messages that the last chain stands for already and whose reply is not whole yet; None between turns.
        ended_by_itself: the last reply's end-of-turn token was sampled.
        malformed: tool calls so far that could not be read.
        llm_s: seconds of generation so far.
        tool_s: seconds between generations so far.
    """

    chains: list[Chain]
    conversation: list[Message]
    tools: list[dict[str, Any]]
    transcript: list[Message]
    history: list[Message]
    asked: list[Message] | None
    ended_by_itself: bool
    malformed: int
    llm_s: float
    tool_s: float


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A handoff record: token streams, shell state and the packed upper (.tar.zst) over the image and `layers`.

    `spent_s` is the service time used up so far, `nodes` where.
    """

    rollout_id: str
    attempt: int
    stream: StreamState
    shell: ShellState
    layers: list[str]
    spent_s: float
    nodes: list[str]
    finished_at: float
    layer_digest: str
    layer: bytes | None = None
