"""What the machine asks the router to do after an event is durable: publish, free, wake. Values only."""

from __future__ import annotations

from typing import Any

import msgspec

from stages.shards.index import IndexLine


class Publish(msgspec.Struct, frozen=True):
    """Append one line to the index; a pure function of journaled events. Its `seq` rises by one over all lines."""

    line: IndexLine


class Failed(msgspec.Struct, frozen=True):
    """Append one line to failures.jsonl for a rollout that did not complete; `seq` is its index line's."""

    seq: int
    line: dict[str, Any]


class Revoke(msgspec.Struct, frozen=True):
    """A member's lease is void: told at its next heartbeat."""

    member: str
    lease: int
    reason: str


class Finished(msgspec.Struct, frozen=True):
    """A RUN result on the handoff files is needed no more: `segment` is its file."""

    segment: str


Effect = Publish | Failed | Revoke | Finished
