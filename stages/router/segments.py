"""Handoff segments that nothing needs any more: found by the ledger's counts, deleted once their writer left them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from stages import sharedfs
from stages.layout import RunLayout, parse_numbered
from stages.ledger.effects import Effect, Finished
from stages.ledger.events import Committed
from stages.ledger.state import State


class SegmentSweeper:
    """Decides which segments may go. A writer that lives still appends to its newest one, so that one stays.

    What holds the result of a superseded attempt stays until no rollout of the run is open: people look there.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._finished: set[str] = set()
        self._newest: dict[str, int] = {}

    def take(self, effects: Sequence[Effect]) -> None:
        """Note segments that no open rollout needs."""
        self._finished.update(effect.segment for effect in effects if isinstance(effect, Finished))

    def waiting(self) -> list[str]:
        """What is finished and not deleted yet."""
        return sorted(self._finished)

    def restore(self, finished: Sequence[str]) -> None:
        """Take over what an earlier router had not deleted yet."""
        self._finished.update(finished)

    def committed(self, event: Committed) -> None:
        """Note which segment a RUN worker writes now."""
        places = [place for item in event.commits for place in (item.segment, item.checkpoint) if place is not None]
        for place in places:
            if (parsed := self._parse(place.path)) is not None:
                member, number = parsed
                self._newest[member] = max(number, self._newest.get(member, 0))

    def gone(self, member: str) -> None:
        """The writer is dead: all of its finished segments may go."""
        self._newest[member] = 1 << 62

    def due(self, state: State) -> list[str]:
        """What may go now, each named once."""
        found = []
        for path in sorted(self._finished):
            parsed = self._parse(path)
            if path in state.segments:
                self._finished.discard(path)
            elif path in state.superseded:
                continue
            elif parsed is not None and parsed[1] < self._newest.get(parsed[0], 0):
                self._finished.discard(path)
                found.append(path)
        return found

    def all_due(self, state: State, writers: frozenset[str]) -> list[str]:
        """What may go when the router leaves: a router that leaves before its `writers` takes nothing of theirs."""
        kept = state.superseded if state.rollouts else {}
        finished = self._finished | (state.superseded.keys() - kept.keys())
        needed = state.segments.keys() | kept.keys()
        return [path for path in sorted(finished - needed) if (self._parse(path) or ("", 0))[0] not in writers]

    def delete(self, paths: Sequence[str]) -> None:
        """Remove the files; blocking. One that resists costs space only."""
        for path in paths:
            with contextlib.suppress(OSError):
                sharedfs.unlink(self._layout.resolve(path))

    @staticmethod
    def _parse(path: str) -> tuple[str, int] | None:
        return parse_numbered(path.rpartition("/")[2], ".seg")
