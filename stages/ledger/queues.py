"""A priority queue with stable order inside a priority and removal by key: heap with lazy deletion."""

from __future__ import annotations

import heapq
from collections.abc import Iterator


class PriorityQueue:
    """Keys by priority (high first), then order (low first); `order` is the acceptance order, kept over retries."""

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []
        self._live: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: str) -> bool:
        return key in self._live

    def push(self, key: str, priority: int, order: int) -> None:
        """Add a key, or move it if it is there already."""
        self._live[key] = (-priority, order)
        heapq.heappush(self._heap, (-priority, order, key))

    def discard(self, key: str) -> None:
        """Take a key out wherever it stands; absent keys are fine."""
        self._live.pop(key, None)

    def entries(self) -> dict[str, tuple[int, int]]:
        """What is queued, with its place: `refill` of another queue makes it the same."""
        return dict(self._live)

    def refill(self, entries: dict[str, tuple[int, int]]) -> None:
        """Hold exactly these entries."""
        self._live = dict(entries)
        self._heap = [(priority, order, key) for key, (priority, order) in entries.items()]
        heapq.heapify(self._heap)

    def first(self, limit: int) -> Iterator[str]:
        """Up to `limit` keys in order, without taking them out."""
        self._prune()
        taken: list[tuple[int, int, str]] = []
        try:
            while self._heap and limit > 0:
                entry = heapq.heappop(self._heap)
                # A key pushed again in its old place leaves an equal entry behind; equal entries come out side by side.
                if self._live.get(entry[2]) != entry[:2] or (taken and taken[-1] == entry):
                    continue
                taken.append(entry)
                limit -= 1
                yield entry[2]
        finally:
            for entry in taken:
                heapq.heappush(self._heap, entry)

    def _prune(self) -> None:
        """Rebuild when dead entries outnumber the living, so that memory follows what is queued."""
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._live):
            self._heap = [(p, o, k) for k, (p, o) in self._live.items()]
            heapq.heapify(self._heap)
