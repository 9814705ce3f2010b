"""What engines say of themselves on /metrics, and which of them should get no new session for now. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

_SAMPLES: Final = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}
RELEASE: Final = 0.8
"""Of the gate: below it a replica that was over is offered sessions again."""
FORGET: Final = 0.98
"""What is left at each look of the most that a session was seen to need."""
FIRST_REST_S, LONGEST_REST_S = 5.0, 60.0
"""How long a replica is left alone after it was over its gate; doubled each time that it is over again soon."""


class Reading(msgspec.Struct, frozen=True):
    """One look at a replica. Counters are since its start; `kv_usage` is the share of its cache in use, 0 to 1."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0
    preemptions: float = 0.0

    @property
    def hit_ratio(self) -> float:
        """Prompt tokens that were found in the prefix cache, of all."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


def reading_of(samples: Mapping[str, float]) -> Reading | None:
    """The figures that an engine exposes under vLLM's names; None where it has none of them."""
    found = {field: samples[name] for field, name in _SAMPLES.items() if name in samples}
    return Reading(**found) if found else None


class _Standing(msgspec.Struct):
    """How a replica stands with its gate: how long it rests, what a session needs, what fits till the next look."""

    reading: Reading
    rest_until: float = 0.0
    rest_s: float = 0.0
    need: float = 0.0
    room: float = float("inf")


class Pressure:
    """Which replicas are over their KV gate, by their own metrics.

    Over the gate, queueing with a nearly full cache, or having preempted since the last look: it rests for some
    seconds, longer each time. Between two looks a replica takes only as many sessions as fit below the gate by what
    one of its own needs now, so a full one is not buried before it can say so.

    Args:
        gate: share of the KV cache in use above which a replica gets no new sessions; 1 or more: no gate.
    """

    def __init__(self, gate: float) -> None:
        self._gate = gate
        self._known: dict[str, _Standing] = {}

    def read(self, replica: str, reading: Reading, sessions: int, now: float) -> None:
        """Take in a look at a replica that carries so many sessions."""
        before = self._known.get(replica)
        standing = _Standing(reading)
        if before is not None:
            standing.rest_until, standing.rest_s, standing.need = before.rest_until, before.rest_s, before.need
        preempted = before is not None and reading.preemptions > before.reading.preemptions
        full = reading.kv_usage >= self._gate or (reading.waiting > 0 and reading.kv_usage >= self._gate * RELEASE)
        if self._gate < 1 and (full or preempted):
            if now >= standing.rest_until:  # not the same trouble still going on
                again = standing.rest_s > 0 and now < standing.rest_until + standing.rest_s
                standing.rest_s = min(LONGEST_REST_S, 2 * standing.rest_s) if again else FIRST_REST_S
            standing.rest_until = now + standing.rest_s
        elif now < standing.rest_until and reading.kv_usage >= self._gate * RELEASE:
            standing.rest_until = now + 1.0
        if sessions > 0 and reading.kv_usage > 0:
            # Of a full cache only what runs says what one needs: the others wait for theirs.
            need = reading.kv_usage / max(1.0, min(sessions, reading.running) if reading.waiting else sessions)
            # Kept in mind for a while: an empty replica is otherwise given more than it had when it was full.
            standing.need = max(need, FORGET * standing.need)
        if standing.need > 0:
            # Where not even two fit, the one would be preempted as it grows: others are better for it.
            crowded = 2 * standing.need > self._gate
            standing.room = 0.0 if crowded else max(0.0, (self._gate - reading.kv_usage) / standing.need)
        self._known[replica] = standing

    def opened(self, replica: str) -> None:
        """A session went to the replica since the last look."""
        standing = self._known.get(replica)
        if standing is not None:
            standing.room -= 1

    def forget(self, replicas: Iterable[str]) -> None:
        """Replicas that have left."""
        for replica in replicas:
            self._known.pop(replica, None)

    def over(self, now: float) -> frozenset[str]:
        """Replicas whose own metrics say that they are full, or were a moment ago."""
        return frozenset(name for name, standing in self._known.items() if now < standing.rest_until)

    def avoided(self, now: float) -> frozenset[str]:
        """Replicas that should get no new session now."""
        if self._gate >= 1:
            return frozenset()
        return frozenset(
            name for name, standing in self._known.items() if now < standing.rest_until or standing.room < 1
        )

    @property
    def readings(self) -> dict[str, Reading]:
        """The last look at each replica."""
        return {name: standing.reading for name, standing in self._known.items()}
