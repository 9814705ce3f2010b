"""Long polls: who waits for what, first come first served."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class Waiters:
    """Requests parked until work of their kind appears; `wake` lets the longest-waiting ones look again."""

    def __init__(self) -> None:
        self._parked: dict[str, deque[asyncio.Future[None]]] = {}

    async def wait(self, kind: str, timeout_s: float) -> bool:
        """Park until woken (True) or until the time is over (False)."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        parked = self._parked.setdefault(kind, deque())
        parked.append(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return False
        finally:
            if not future.done() or future.cancelled():
                future.cancel()
                with contextlib.suppress(ValueError):
                    parked.remove(future)
        return True

    def parked(self, kind: str) -> bool:
        """Whether anybody waits."""
        return bool(self._parked.get(kind))

    def wake(self, kind: str, count: int) -> None:
        """Wake up to `count` of those that wait."""
        parked = self._parked.get(kind)
        while parked and count > 0:
            future = parked.popleft()
            if not future.done():
                future.set_result(None)
                count -= 1

    def wake_all(self) -> None:
        """Let everybody look: shutdown."""
        for kind, parked in self._parked.items():
            self.wake(kind, len(parked))
