"""A worker's slots: how many leases are at work at once, which wait for their turn, and how many are asked for ahead.

A slot stands empty for as long as its next lease takes to come: a request, and an event durable at the router. So
where slots come free many times a second, as many leases are asked for ahead as come to their turn within `LEAD_S`.
Where a rollout takes minutes that is none, and no lease waits here while another worker has nothing to do.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

LEAD_S: Final = 0.1
"""How long before its slot comes free a lease is asked for."""
_WINDOW_S: Final = 1.0
"""Over which the rate of free slots is taken."""
_REMEMBERED: Final = 1024


class Slots:
    """First come, first served; belongs to one event loop.

    Args:
        count: leases at work at once.
        on_leave: called when a slot came free.
        clock: monotonic seconds.
    """

    def __init__(
        self, count: int, on_leave: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.count = count
        self._on_leave, self._clock = on_leave, clock
        self._busy: set[str] = set()
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._began: dict[str, float] = {}
        self._left: deque[float] = deque(maxlen=_REMEMBERED)
        self._closed = False

    @property
    def busy(self) -> int:
        """Leases at work."""
        return len(self._busy)

    def wanted(self) -> int:
        """How many leases to ask for now, those ahead among them; 0 or less: none."""
        room = self.count + self._ahead() - len(self._busy) - len(self._waiting)
        # What has left its slot is still being handed over: where that stands still, nothing piles up behind it.
        return min(room, 2 * self.count + self._ahead() - len(self._began))

    def _ahead(self) -> int:
        since = self._clock() - _WINDOW_S
        while self._left and self._left[0] < since:
            self._left.popleft()
        return min(self.count, int(len(self._left) * LEAD_S / _WINDOW_S))

    def enter(self, lease: str) -> None:
        """A lease has come: it has its turn now, or waits for it."""
        self._began[lease] = self._clock()
        if len(self._busy) < self.count:
            self._busy.add(lease)
        elif not self._closed:
            self._waiting[lease] = asyncio.get_running_loop().create_future()

    async def turn(self, lease: str) -> bool:
        """Wait until the lease is at work; False where the worker takes up no more work."""
        waiter = self._waiting.get(lease)
        if waiter is None:
            return lease in self._busy
        return await waiter

    def leave(self, lease: str) -> None:
        """Its sandbox and its agent are done: the slot is another's, whatever is still to be written. Idempotent."""
        self._waiting.pop(lease, None)
        if lease not in self._busy:
            return
        self._busy.discard(lease)
        self._left.append(self._clock())
        self._call_next()
        self._on_leave()

    def _call_next(self) -> None:
        while self._waiting and len(self._busy) < self.count:
            lease, waiter = next(iter(self._waiting.items()))
            del self._waiting[lease]
            if not waiter.done():
                self._busy.add(lease)
                self._began[lease] = self._clock()
                waiter.set_result(True)

    def spent_s(self, lease: str) -> float:
        """Seconds since the lease's turn began."""
        return self._clock() - self._began[lease]

    def forget(self, lease: str) -> None:
        """The lease is over."""
        self.leave(lease)
        del self._began[lease]

    def close(self) -> None:
        """Nobody's turn comes any more; who is at work goes on."""
        self._closed = True
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(False)
        self._waiting.clear()
