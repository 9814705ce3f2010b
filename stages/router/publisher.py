"""Publishing: index lines and failures after their events are durable; GET answers from what is published."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Any, Final

from stages.layout import RunLayout
from stages.ledger.effects import Effect, Failed, Publish
from stages.router.failures import FailuresFile
from stages.router.published import Published
from stages.shards.index import IndexLine
from stages.shards.index_writer import IndexWriter

RETRY_S: Final = 0.5


class Publisher:
    """Appends what the ledger publishes and answers for what is out.

    The journal decides and the index only shows, so an answer to a worker does not wait for the index.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._index: IndexWriter | None = None
        self._failures = FailuresFile(layout, [])
        self._lines: list[IndexLine] = []
        self._failed: list[Failed] = []
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._closed = False
        self._out = Published(layout)
        self.complete = 0

    def load(self) -> None:
        """Find what earlier routers published. Blocking; before the first `take`."""
        self._out.load()

    def keep_failures(self, lines: Sequence[bytes]) -> None:
        """Begin failures.jsonl with these; what replay does not tell again."""
        self._failures = FailuresFile(self._layout, lines)

    def take(self, effects: Sequence[Effect]) -> None:
        """Queue what the effects of a durable event publish; what is out already is not published again."""
        for effect in effects:
            if isinstance(effect, Publish):
                if effect.line.seq > len(self._out):
                    self._lines.append(effect.line)
            elif isinstance(effect, Failed):
                self._failed.append(effect)
        if self._lines or self._failed:
            self._wake.set()

    def begin(self, epoch: int) -> None:
        """Open this epoch's index, which cuts older ones after what they truly published. Blocking."""
        self._index = IndexWriter(self._layout, epoch, after_seq=len(self._out))
        self._index.open()

    async def run(self) -> None:
        """Publish until closed; a filesystem that refuses is asked again."""
        self._wake.set()
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not await self._flush():
                await asyncio.sleep(RETRY_S)
                self._wake.set()
            elif self._closed and not self._lines and not self._failed:
                return

    async def _flush(self) -> bool:
        """Whether all that waited is out."""
        lines, self._lines = self._lines, []
        failed, self._failed = self._failed, []
        self._failures.take(failed)
        done = await asyncio.to_thread(self._write, lines)
        assert self._index is not None
        placed, self._index.placed = self._index.placed, []
        for key, offset, texts in placed:
            ends = itertools.accumulate(map(len, texts), initial=offset)
            self._out.add(key, list(ends)[:-1], [text[:-1] for text in texts])
        if done:
            self.complete = len(self._out)
        if placed or done:
            self._changed.set()
            self._changed = asyncio.Event()
        return done

    def _write(self, lines: Sequence[IndexLine]) -> bool:
        assert self._index is not None
        done = True
        try:
            self._index.publish(lines)
        except OSError:
            done = False  # it keeps what it was given
        try:
            self._failures.write()
        except OSError:
            done = False
        return done

    def seq_of_rollout(self, rollout_id: str) -> int | None:
        """The seq of an ended rollout's line, or None where it is not out."""
        return self._out.ids.rollout(rollout_id)

    def seq_of_group(self, group_id: str) -> int | None:
        """The seq of a closed group's line, or None where it is not out."""
        return self._out.ids.group(group_id)

    async def line(self, seq: int) -> dict[str, Any]:
        """The published line of a seq."""
        return await self._out.line(seq)

    async def texts(self, after: int, limit: int) -> list[bytes]:
        """Published lines from `after` + 1 on, at most `limit`, fewer where they are many bytes."""
        return await self._out.texts(after, limit)

    @property
    def published(self) -> int:
        """The highest seq that is out."""
        return len(self._out)

    async def wait_for_more(self, after: int, timeout_s: float) -> bool:
        """Whether anything beyond `after` is out, waiting up to `timeout_s` for it."""
        if self.published > after:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def completed(self, seq: int, timeout_s: float) -> bool:
        """Whether everything up to `seq` is durable in index and failures, waiting up to `timeout_s` for it."""
        until = time.monotonic() + timeout_s
        while self.complete < seq:
            left_s = until - time.monotonic()
            if left_s <= 0 or self._closed:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
        return True

    def wake_all(self) -> None:
        """Let every long poll look again."""
        self._changed.set()

    def close(self) -> None:
        """Let `run` publish what waits and return; then close the files with `close_files`."""
        self._closed = True
        self._wake.set()

    def close_files(self) -> None:
        """Close index and failures."""
        if self._index is not None:
            self._index.close()
        self._failures.close()
