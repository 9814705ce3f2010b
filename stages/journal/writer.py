"""The journal's writer: group commit with one fsync for all that waits, fenced, going on in a new part after a fault.

Order of one batch: payload packs durable, journal lines durable, fence looked at, and only then are effects published
and callers answered. A part that failed once is never appended again: the next part's first record names the good
lengths of those before it, and everything unacknowledged is written anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from stages import sharedfs
from stages.errors import FencedError, JournalError
from stages.journal.codec import encode_line
from stages.journal.history import is_fenced
from stages.journal.payloads import Payloads
from stages.layout import RunLayout
from stages.ledger import events
from stages.ledger.effects import Effect
from stages.ledger.events import AnyEvent, Part, PartBegan

PART_BYTES: Final = 64 << 20
RETRY_S: Final = 0.5


class Entry(NamedTuple):
    """An event on its way to disk, with what is due when it is there."""

    line: bytes
    reply: Any
    effects: list[Effect]
    waiter: asyncio.Future[Any] | None


class JournalWriter:
    """Appends events of one epoch. `put` from the event loop; `run` is the one task that writes."""

    def __init__(
        self,
        layout: RunLayout,
        epoch: int,
        payloads: Payloads,
        publish: Callable[[list[Effect]], None],
        clock: Callable[[], float],
    ) -> None:
        self._layout, self._epoch, self._payloads = layout, epoch, payloads
        self._publish, self._clock = publish, clock
        self._pending: list[Entry] = []
        self._wake = asyncio.Event()
        self._closed = False
        self._file: sharedfs.AppendFile | None = None
        self._part = -1
        self._last_crc = ""
        self._before: list[Part] = []
        self.stalled_since: float | None = None
        self.stall_reason = ""
        self.fsync_s: list[float] = []
        self.events = 0
        self.bytes = 0

    def put(self, event: AnyEvent, reply: Any, effects: list[Effect]) -> asyncio.Future[Any]:
        """Queue an applied event; the future gives `reply` once it is durable and published."""
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending.append(Entry(encode_line(events.encode(event)), reply, effects, waiter))
        self._wake.set()
        return waiter

    async def run(self) -> None:
        """Write batches until closed.

        Raises:
            FencedError: a newer epoch exists; nothing that waits is acknowledged.
        """
        staged: dict[str, bytes] = {}
        batch: list[Entry] = []
        while True:
            if not batch:
                await self._wake.wait()
                self._wake.clear()
                batch, self._pending = self._pending, []
                if not batch and self._closed:
                    return
            staged.update(self._payloads.take_staged())
            try:
                await asyncio.to_thread(self._write, batch, staged)
            except FencedError as error:
                self._refuse(batch + self._pending, error)
                raise
            except OSError as error:
                # Acknowledgements stop here until the disk is well again; requests get 503 meanwhile.
                self.stalled_since = self.stalled_since or time.monotonic()
                self.stall_reason = str(error)
                await asyncio.sleep(RETRY_S)
                continue
            self.stalled_since, staged = None, {}
            self._settle(batch)
            batch = []
            if self._pending or self._closed:
                self._wake.set()

    def _write(self, batch: list[Entry], staged: dict[str, bytes]) -> None:
        started = time.perf_counter()
        self._payloads.write(staged)
        file = self._usable_part()
        file.append(b"".join([entry.line for entry in batch]))
        file.sync()
        self._last_crc = batch[-1].line[:8].decode() if batch else self._last_crc
        if is_fenced(self._layout, self._epoch):
            raise FencedError(f"epoch {self._epoch} is over: a newer router has claimed {self._layout.root}")
        self.fsync_s.append(time.perf_counter() - started)
        self.events += len(batch)

    def _usable_part(self) -> sharedfs.AppendFile:
        file = self._file
        if file is not None and not file.broken and file.good_length < PART_BYTES:
            return file
        if file is not None:
            good = file.good_length
            self._before.append(Part(self._epoch, self._part, good, self._last_crc if good else ""))
            file.close()
            self._file = None
        self._part += 1
        file = sharedfs.AppendFile(self._layout.journal_part(self._epoch, self._part))
        self._file = file
        if self._part > 0:
            began = PartBegan(t=self._clock(), epoch=self._epoch, part=self._part, before=self._before)
            file.append(encode_line(events.encode(began)))
        return file

    def _settle(self, batch: list[Entry]) -> None:
        self._publish([effect for entry in batch for effect in entry.effects])
        for entry in batch:
            self.bytes += len(entry.line)
            if entry.waiter is not None and not entry.waiter.done():
                entry.waiter.set_result(entry.reply)

    def _refuse(self, entries: list[Entry], error: Exception) -> None:
        self._closed = True
        for entry in entries:
            if entry.waiter is not None and not entry.waiter.done():
                entry.waiter.set_exception(error)

    def check_open(self) -> None:
        """Refuse events while nothing could acknowledge them.

        Raises:
            JournalError: closed, or stalled by the filesystem.
        """
        if self._closed:
            raise FencedError(f"epoch {self._epoch} has ended")
        if self.stalled_since is not None:
            stalled_s = time.monotonic() - self.stalled_since
            raise JournalError(f"journal stalled for {stalled_s:.1f} s: {self.stall_reason}", stalled_s=stalled_s)

    def close(self) -> None:
        """Write out what waits and let `run` return."""
        self._closed = True
        self._wake.set()
