"""How many bytes of requests' bodies are held at once: a share for each server, and a pool for all of a process.

A share that is used up refuses: its session's own requests fill it. A pool that is full makes readers wait, since those
who filled it may be others: of the connections whose bodies are still coming one at a time reads on, so that there is
always one that gets to its end.
"""

from __future__ import annotations

from typing import Final, Protocol

SHARE_BYTES: Final = 64 * 1024 * 1024
"""Sixteen of the largest bodies, a thousand of 64 KB."""
POOL_BYTES: Final = 512 * 1024 * 1024


class Reader(Protocol):
    """What waits; an asyncio transport is one."""

    def pause_reading(self) -> None:
        """Read no more; again: nothing."""
        ...

    def resume_reading(self) -> None:
        """Read on; again: nothing."""
        ...


class Pool:
    """The bodies of a process.

    Args:
        most: bytes above which readers wait for each other.
    """

    def __init__(self, most: int = POOL_BYTES) -> None:
        self._most = most
        self.held = 0
        self._waiting: dict[Reader, None] = {}

    def changed(self, size: int) -> None:
        """So many bytes more are held, or fewer."""
        self.held += size
        if size < 0 and self.held <= self._most:
            for reader in self._waiting:
                reader.resume_reading()
            self._waiting.clear()

    def wait(self, reader: Reader) -> None:
        """Called by a reader whose body is not whole yet: it reads on where there is room, or it is the first."""
        if self.held > self._most:
            self._waiting[reader] = None
            if self.holds_up(reader):
                reader.pause_reading()

    def holds_up(self, reader: Reader) -> bool:
        """Whether it waits for others."""
        return reader in self._waiting and next(iter(self._waiting)) is not reader

    def leave(self, reader: Reader) -> None:
        """Its body is whole, or never will be: the next one reads on."""
        if reader in self._waiting:
            del self._waiting[reader]
            reader.resume_reading()
            for first in self._waiting:
                first.resume_reading()
                return


POOL: Final = Pool()
"""A process has one event loop, and a server for each attempt."""


class Share:
    """The bodies of one server, which are some of a pool's.

    Args:
        most: bytes that it may hold.
        pool: what they are part of.
    """

    def __init__(self, most: int = SHARE_BYTES, pool: Pool = POOL) -> None:
        self._most = most
        self.pool = pool
        self.held = 0

    def take(self, size: int) -> bool:
        """Hold so many more, or none of them where that is too much."""
        if self.held + size > self._most:
            return False
        self.held += size
        self.pool.changed(size)
        return True

    def give(self, size: int) -> None:
        """Hold so many no more."""
        self.held -= size
        self.pool.changed(-size)


class Hold:
    """One body's part of a share."""

    def __init__(self, share: Share) -> None:
        self._share, self.size = share, 0

    def grow(self, size: int) -> bool:
        """Hold so many bytes more; False where the share has not got them."""
        if not self._share.take(size):
            return False
        self.size += size
        return True

    def free(self) -> None:
        """Hold none of them any more. Idempotent."""
        if self.size:
            self._share.give(self.size)
            self.size = 0
