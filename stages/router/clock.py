"""The router's clock: wall time that never runs backwards within a run, advanced by the monotonic clock alone."""

from __future__ import annotations

import time


class Clock:
    """Starts at the wall clock, or at the run's last journaled time where that is later."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def __call__(self) -> float:
        """Seconds since the Unix epoch, to the millisecond."""
        return round(self._offset + time.monotonic(), 3)
