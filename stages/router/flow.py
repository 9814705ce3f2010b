"""How many rollouts RUN may hold at once, steered by what the engines say: grow, hold, cut on preemptions. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from stages.router.readings import Reading

CUT: Final = 0.75
"""What is left of the concurrency after a preemption."""
GROW: Final = 1.25
FLOOR: Final = 4
"""Rollouts a replica that are never cut below: with fewer the engine idles between turns."""
FULL, EASY = 0.9, 0.7
"""KV use above which concurrency holds, and below which it may grow."""
QUEUE: Final = 0.5
"""Waiting requests for each running one above which concurrency holds."""
SETTLE_LOOKS: Final = 3
"""Looks after a cut that are not counted: what was in flight before still preempts."""


class Flow(msgspec.Struct):
    """The limit on RUN's leases, fed one look after the other; None: no limit, which is how it begins.

    Attributes:
        limit: rollouts that may be in RUN at once, or None.
        preemptions: of all replicas at the last look, by replica.
        settling: looks that still belong to the last cut.
    """

    limit: int | None = None
    preemptions: dict[str, float] = {}
    settling: int = 0

    def look(self, readings: Mapping[str, Reading], running: int, wanted: int) -> str:
        """Take in a look at every replica; says `grow`, `hold` or `cut`.

        Args:
            readings: by replica; one that is not there any more is left out.
            running: rollouts in RUN now.
            wanted: rollouts that wait for RUN.
        """
        preempted = any(
            reading.preemptions > self.preemptions[name]
            for name, reading in readings.items()
            if name in self.preemptions
        )
        self.preemptions = {name: reading.preemptions for name, reading in readings.items()}
        self.settling = max(0, self.settling - 1)
        if not readings:
            return "hold"
        if preempted:
            if self.settling:
                return "hold"
            base = running if self.limit is None else min(self.limit, max(running, 1))
            self.limit = max(FLOOR * len(readings), math.floor(base * CUT))
            self.settling = SETTLE_LOOKS
            return "cut"
        if self.limit is None:
            return "hold"
        easy = all(reading.kv_usage < EASY for reading in readings.values())
        queued = sum(reading.waiting for reading in readings.values())
        if not easy or queued > QUEUE * sum(reading.running for reading in readings.values()):
            return "hold"
        # What is not used says nothing of what would be too much.
        if running < self.limit or wanted == 0:
            return "hold"
        self.limit = max(self.limit + 1, math.floor(self.limit * GROW))
        return "grow"

    def room(self, running: int) -> int:
        """Rollouts that RUN may take more."""
        return 1 << 30 if self.limit is None else max(0, self.limit - running)
