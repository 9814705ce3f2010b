"""Group commit into rotated append-only files: many callers append at once, one fsync acknowledges all that wait.

The event loop only queues; packing, writing and fsync run in a thread, one group at a time, so a group is what came
in during the fsync before it. A file that fails once is left for good: a new one is begun and everything that was not
acknowledged is written anew. While the disk is full or the filesystem stalls callers wait, up to their deadline.
"""

from __future__ import annotations

import asyncio
import errno
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from stages import sharedfs
from stages.errors import ShardError
from stages.layout import RunLayout
from stages.trajectory import RowRange

T = TypeVar("T")

ROTATE_BYTES = 256 << 20
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EEXIST})
"""What may be otherwise in a moment or in a new file; other errnos (permissions, missing directory) fail at once."""


@dataclass(frozen=True)
class Block:
    """Bytes that are written as one range (a multiple of 8), and how many of the group's items they hold, in order."""

    data: bytes | memoryview
    items: int


@dataclass(frozen=True)
class Policy(Generic[T]):
    """How items become files.

    Args:
        path: the file of a number; numbers only rise.
        pack: a group of items to blocks; runs in a thread.
        weight: bytes of an item, roughly.
        key: two items with one key never share a group; None for items that never clash.
        header: what each file begins with, durable before the first range.
        max_items: items in one group.
        max_bytes: weight of one group, if it has more than one item.
        rotate_bytes: a file of this length takes no more groups.
    """

    path: Callable[[int], Path]
    pack: Callable[[Sequence[T]], Sequence[Block]]
    weight: Callable[[T], int]
    key: Callable[[T], str] | None = None
    header: bytes = b""
    max_items: int = 64
    max_bytes: int = 8 << 20
    rotate_bytes: int = ROTATE_BYTES


class _Waiter(Generic[T]):
    """One item and the caller who waits for its range."""

    def __init__(self, item: T, weight: int) -> None:
        self.item = item
        self.weight = weight
        self.future: asyncio.Future[RowRange] = asyncio.get_running_loop().create_future()


class _Files(Generic[T]):
    """The thread's side: the file of now, its successor after a failure or at its size. Not shared between threads."""

    def __init__(self, layout: RunLayout, policy: Policy[T]) -> None:
        self.layout = layout
        self.policy = policy
        self._file: sharedfs.AppendFile | None = None
        self._number = 0
        self._acknowledged = 0

    def write(self, blocks: Sequence[Block]) -> list[RowRange]:
        """Write and fsync the blocks; one range a block. On OSError the file is left and the next call begins anew."""
        try:
            file = self._ready()
            ranges = []
            for block in blocks:
                offset = file.append(block.data)
                size, crc = len(block.data), zlib.crc32(block.data)
                ranges.append(RowRange(self.layout.relative(file.path), offset, size, crc))
            file.sync()
        except OSError:
            self.close()
            raise
        self._acknowledged += len(ranges)
        return ranges

    def close(self) -> None:
        """Leave the file; one in which nothing was ever acknowledged is taken away."""
        file, self._file = self._file, None
        if file is None:
            return
        file.close()
        if self._acknowledged == 0:
            sharedfs.unlink(file.path)

    def _ready(self) -> sharedfs.AppendFile:
        if self._file is not None and self._file.length >= self.policy.rotate_bytes:
            self.close()
        if self._file is None:
            number, self._number = self._number, self._number + 1
            self._file, self._acknowledged = sharedfs.AppendFile(self.policy.path(number)), 0
            if self.policy.header:
                self._file.append(self.policy.header)
                self._file.sync()
        return self._file


class GroupCommit(Generic[T]):
    """An async context manager with one method, `append`; leaving it waits for what is queued and closes the file."""

    def __init__(self, layout: RunLayout, policy: Policy[T], *, deadline_s: float = 120.0) -> None:
        self._policy = policy
        self._files = _Files(layout, policy)
        self._deadline_s = deadline_s
        self._waiting: list[_Waiter[T]] = []
        self._flusher: asyncio.Task[None] | None = None
        self._closed = False
        self._last_error: OSError | None = None

    async def append(self, item: T) -> RowRange:
        """Queue the item and return its range once it is durable.

        Raises:
            ShardError: not durable within the deadline, or the filesystem refuses for good; nothing is promised then.
        """
        if self._closed:
            raise ShardError(f"{self._policy.path(0).parent}: this writer is closed")
        waiter, began = _Waiter(item, self._policy.weight(item)), time.monotonic()
        self._waiting.append(waiter)
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush(), name="group-commit")
        try:
            async with asyncio.timeout(self._deadline_s):
                return await waiter.future
        except TimeoutError:
            spent, why = time.monotonic() - began, self._last_error or "the filesystem has not answered"
            where = self._policy.path(0).parent
            raise ShardError(f"{where}: not durable after {spent:.1f} s of {self._deadline_s:g} s: {why}") from None

    async def __aenter__(self) -> GroupCommit[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        if self._flusher is not None:
            await asyncio.shield(self._flusher)
        await asyncio.shield(asyncio.to_thread(self._files.close))

    async def _flush(self) -> None:
        while group := self._take():
            try:
                await self._commit(group)
            except Exception as error:  # noqa: BLE001 - boundary: one group's failure goes to its callers, not to the writer
                for waiter in group:
                    if not waiter.future.done():
                        waiter.future.set_exception(error)

    def _take(self) -> list[_Waiter[T]]:
        """The next group, in order of arrival; the rest stays. Callers who have gone are dropped."""
        group: list[_Waiter[T]] = []
        rest: list[_Waiter[T]] = []
        keys: set[str] = set()
        weight, full = 0, False
        for waiter in self._waiting:
            if waiter.future.done():
                continue
            key = self._policy.key(waiter.item) if self._policy.key else None
            full = full or len(group) == self._policy.max_items
            full = full or (bool(group) and weight + waiter.weight > self._policy.max_bytes)
            if full or key in keys:
                rest.append(waiter)
                continue
            group.append(waiter)
            weight += waiter.weight
            if key is not None:
                keys.add(key)
        self._waiting = rest
        return group

    async def _commit(self, group: list[_Waiter[T]]) -> None:
        blocks: list[Block] = []
        items = [waiter.item for waiter in group]

        def pack_and_write() -> list[RowRange]:
            """Both in one turn of a thread; a write that failed is tried again with the same blocks."""
            if not blocks:
                blocks.extend(self._policy.pack(items))
            return self._files.write(blocks)

        try:
            ranges = await self._write(group, pack_and_write)
        except Exception:  # boundary: an item that cannot be packed fails its own rollout, not its neighbours'
            if len(group) == 1 or blocks:
                raise
            for waiter in group:
                await self._alone(waiter)
            return
        waiters = iter(group)
        for block, place in zip(blocks, ranges, strict=False):
            for _ in range(block.items):
                waiter = next(waiters)
                if not waiter.future.done():
                    waiter.future.set_result(place)

    async def _alone(self, waiter: _Waiter[T]) -> None:
        try:
            await self._commit([waiter])
        except Exception as error:  # noqa: BLE001 - boundary: as in _commit
            if not waiter.future.done():
                waiter.future.set_exception(error)

    async def _write(self, group: list[_Waiter[T]], write: Callable[[], list[RowRange]]) -> list[RowRange]:
        """Ranges of the blocks, tried again in new files while the failure may pass and somebody still waits."""
        pause = _FIRST_PAUSE_S
        while any(not waiter.future.done() for waiter in group):
            try:
                ranges = await asyncio.to_thread(write)
            except OSError as error:
                self._last_error = error
                if error.errno not in _PASSING:
                    raise ShardError(f"{error.filename or self._policy.path(0).parent}: {error.strerror}") from error
            else:
                self._last_error = None
                return ranges
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)
        return []
