"""Publishing: index lines and failures after their events are durable; GET answers from what is published."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from stages import sharedfs
from stages.layout import RunLayout
from stages.ledger.effects import Effect, Failed, Publish
from stages.shards.index import IndexFollower, IndexLine, RowsLine
from stages.shards.index_writer import IndexWriter

RETRY_S: Final = 0.5


class Publisher:
    """Appends what the ledger publishes and keeps the published lines: line `seq` is `lines[seq - 1]`.

    The journal decides and the index only shows, so an answer to a worker does not wait for the index.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._index: IndexWriter | None = None
        self._failures: sharedfs.AppendFile | None = None
        self._lines: list[IndexLine] = []
        self._failed: list[Failed] = []
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._closed = False
        self.lines: list[bytes] = []
        self.rows: dict[str, int] = {}
        self.groups: dict[str, int] = {}

    def take(self, effects: Sequence[Effect]) -> None:
        """Queue what the effects of a durable event publish."""
        for effect in effects:
            if isinstance(effect, Publish):
                self._lines.append(effect.line)
            elif isinstance(effect, Failed):
                self._failed.append(effect)
        self._wake.set()

    def begin(self, epoch: int) -> None:
        """Open this epoch's index, which cuts older ones after what they truly published. Blocking."""
        follower = IndexFollower(self._layout.root)
        while follower.poll():
            pass
        self._index = IndexWriter(self._layout, epoch, after_seq=follower.seq)
        self._index.open()
        replayed, self._lines = self._lines, []
        self._index.publish([line for line in replayed if line.seq > follower.seq])
        self._remember(replayed)
        # Derived data: written anew, so that an older router's descriptor leads to a file without a name.
        sharedfs.unlink(self._layout.failures)
        self._failures = sharedfs.AppendFile(self._layout.failures)
        self._append_failures()

    async def run(self) -> None:
        """Publish until closed; a filesystem that refuses is asked again."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._flush()
            if self._closed:
                return

    async def _flush(self) -> None:
        assert self._index is not None
        lines, self._lines = self._lines, []
        given = lines
        while lines:
            try:
                await asyncio.to_thread(self._index.publish, given)
            except OSError:
                given = []  # the writer keeps what it was given
                await asyncio.sleep(RETRY_S)
                continue
            break
        if self._failed:
            await asyncio.to_thread(self._append_failures)
        if lines:
            self._remember(lines)
            self._changed.set()
            self._changed = asyncio.Event()

    def _append_failures(self) -> None:
        failed, self._failed = self._failed, []
        # Where this file is broken the next epoch writes it anew: the journal has everything.
        if failed and self._failures is not None and not self._failures.broken:
            self._failures.append(b"".join(msgspec.json.encode(effect.line) + b"\n" for effect in failed))

    def _remember(self, lines: Sequence[IndexLine]) -> None:
        for line in lines:
            self.lines.append(msgspec.json.encode(line))
            if isinstance(line, RowsLine):
                self.rows[line.rollout_id] = line.seq
            else:
                self.groups[line.group_id] = line.seq

    def line(self, seq: int) -> dict[str, Any]:
        """The published line of a seq."""
        result: dict[str, Any] = msgspec.json.decode(self.lines[seq - 1])
        return result

    @property
    def published(self) -> int:
        """The highest seq that is out."""
        return len(self.lines)

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
        if self._failures is not None:
            self._failures.close()
