"""The journal's writer: group commit with one fsync for all that waits, fenced, going on in a new part after a fault.

Order of one batch: payload packs durable, journal lines durable, fence looked at, and only then are effects published
and callers answered. A part that failed once is never appended again: the next part's first record names the good
lengths of those before it, and everything unacknowledged is written anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from stages import sharedfs
from stages.errors import FencedError, JournalError
from stages.journal.codec import encode_line
from stages.journal.fence import Fence
from stages.journal.payloads import Payloads
from stages.layout import RunLayout
from stages.ledger import events
from stages.ledger.effects import Effect
from stages.ledger.events import AnyEvent, Part, PartBegan

PART_BYTES: Final = 64 << 20
RETRY_S: Final = 0.5
STALL_S: Final = 5.0
"""A batch that takes longer than this to become durable is a stall: nobody is let in, nobody waits on."""
SAMPLES: Final = 4096


class Covered(NamedTuple):
    """Exact bytes: this epoch's parts so far, the last one up to a line of `last_line` bytes."""

    parts: list[Part]
    last_line: int


class Entry(NamedTuple):
    """An event on its way to disk, with what is due when it is there. A `mark` asks where the journal then stands."""

    t: float
    line: bytes
    reply: Any
    effects: list[Effect]
    waiter: asyncio.Future[Any]
    mark: asyncio.Future[Covered] | None


class _Batch:
    """What becomes durable together, and how far that has come: a step that is done is not done again."""

    def __init__(self, entries: list[Entry], staged: dict[str, bytes]) -> None:
        self.entries, self.staged = entries, staged
        self.written = False


class JournalWriter:
    """Appends events of one epoch. `put` from the event loop; `run` is the one task that writes."""

    def __init__(
        self,
        layout: RunLayout,
        epoch: int,
        payloads: Payloads,
        publish: Callable[[list[Effect]], None],
        *,
        fence: Fence | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self._layout, self._epoch, self._payloads = layout, epoch, payloads
        self._publish, self._stall_s = publish, stall_s
        self._fence = fence or Fence(layout, epoch)
        self._pending: list[Entry] = []
        self._wake = asyncio.Event()
        self._closed = False
        self._refused: JournalError | None = None
        self._file: sharedfs.AppendFile | None = None
        self._part = -1
        self._last_line = b""
        self._before: list[Part] = []
        self._busy_since: float | None = None
        self._refused_since: float | None = None
        self._reason = ""
        self.fsync_s: deque[float] = deque(maxlen=SAMPLES)
        self.events = 0
        self.bytes = 0

    def put(
        self, event: AnyEvent, reply: Any, effects: list[Effect], mark: asyncio.Future[Covered] | None = None
    ) -> asyncio.Future[Any]:
        """Queue an applied event; the future gives `reply` once it is durable and published."""
        return self._queue(event.t, encode_line(events.encode(event)), reply, effects, mark)

    def settled(self) -> asyncio.Future[Any]:
        """A future that is done once everything put so far is durable."""
        return self._queue(0.0, b"", None, [], None)

    def _queue(
        self, t: float, line: bytes, reply: Any, effects: list[Effect], mark: asyncio.Future[Covered] | None
    ) -> asyncio.Future[Any]:
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._refused is not None:
            waiter.set_exception(self._refused)
            return waiter
        self._pending.append(Entry(t, line, reply, effects, waiter, mark))
        self._wake.set()
        return waiter

    async def run(self) -> None:
        """Write batches until closed.

        Raises:
            FencedError: a newer epoch exists; nothing that waits is acknowledged.
        """
        while self._pending or not self._closed:
            await self._wake.wait()
            self._wake.clear()
            if not self._pending:
                continue
            entries, self._pending = self._pending, []
            try:
                await self._persist(_Batch(entries, self._payloads.take_staged()))
            except BaseException as error:  # whoever waits must hear of it, whatever it is; raised again below
                self._refuse(entries + self._pending, error)
                raise
            self._settle(entries)

    async def _persist(self, batch: _Batch) -> None:
        """Make a batch durable, however long the filesystem refuses: acknowledgements stop until it is well again."""
        self._busy_since = time.monotonic()
        while True:
            try:
                await asyncio.to_thread(self._write, batch)
                break
            except OSError as error:
                self._refused_since = self._refused_since or time.monotonic()
                self._reason = str(error)
                await asyncio.sleep(RETRY_S)
        self._busy_since = self._refused_since = None

    def _write(self, batch: _Batch) -> None:
        started = time.perf_counter()
        self._payloads.write(batch.staged)
        batch.staged = {}
        if not batch.written:
            file = self._usable_part(batch.entries[0].t)
            file.append(b"".join([entry.line for entry in batch.entries]))
            file.sync()
            # From here on only the fence may be asked again: lines written twice would be events that happened twice.
            batch.written = True
            self._last_line = next((e.line for e in reversed(batch.entries) if e.line), self._last_line)
        self._fence.check()
        self.fsync_s.append(time.perf_counter() - started)
        self.events += len(batch.entries)

    def _usable_part(self, t: float) -> sharedfs.AppendFile:
        """The part to append to. A new one is dated `t`, like what comes first in it: replay must not run ahead."""
        file = self._file
        if file is not None and not file.broken and file.good_length < PART_BYTES:
            return file
        if file is not None:
            self._before.append(self._part_now(file.good_length))
            file.close()
            self._file = None
        self._part += 1
        file = sharedfs.AppendFile(self._layout.journal_part(self._epoch, self._part))
        self._file = file
        if self._part > 0:
            began = PartBegan(t=t, epoch=self._epoch, part=self._part, before=self._before)
            file.append(encode_line(events.encode(began)))
        return file

    def _part_now(self, length: int) -> Part:
        return Part(self._epoch, self._part, length, self._last_line[:8].decode() if length else "")

    def _settle(self, entries: list[Entry]) -> None:
        self._publish([effect for entry in entries for effect in entry.effects])
        assert self._file is not None
        position = self._file.good_length - sum(len(entry.line) for entry in entries)
        for entry in entries:
            position += len(entry.line)
            self.bytes += len(entry.line)
            if entry.mark is not None and not entry.mark.done():
                part = Part(self._epoch, self._part, position, entry.line[:8].decode())
                entry.mark.set_result(Covered([*self._before, part], len(entry.line)))
            if not entry.waiter.done():
                entry.waiter.set_result(entry.reply)

    def _refuse(self, entries: list[Entry], error: BaseException) -> None:
        self._closed = True
        self._refused = error if isinstance(error, JournalError) else FencedError(f"epoch {self._epoch} has ended")
        for entry in entries:
            for future in (entry.waiter, entry.mark):
                if future is not None and not future.done():
                    if isinstance(error, JournalError):
                        future.set_exception(error)
                        future.exception()  # whoever has given up waiting need not be told
                    else:
                        future.cancel()

    def covered(self) -> Covered | None:
        """Where the journal stands; None unless all that was put is durable and ends in a line of this epoch."""
        if self._pending or self._busy_since is not None or self._file is None or not self._last_line:
            return None
        return Covered([*self._before, self._part_now(self._file.good_length)], len(self._last_line))

    @property
    def stalled_s(self) -> float:
        """For how long the filesystem has refused, or kept a batch waiting beyond the bound; 0 while all is well."""
        if self._refused_since is not None:
            return time.monotonic() - self._refused_since
        return self.busy_s if self.busy_s > self._stall_s else 0.0

    @property
    def busy_s(self) -> float:
        """For how long the batch that is being written has been on its way; 0 between batches."""
        return 0.0 if self._busy_since is None else time.monotonic() - self._busy_since

    def stalled(self) -> JournalError:
        """What callers are told who waited, or want in, while nothing can be acknowledged."""
        stalled_s = self.stalled_s
        reason = self._reason if self._refused_since is not None else f"{self._layout.journal} does not answer"
        return JournalError(f"journal stalled for {stalled_s:.1f} s: {reason}; ask again", stalled_s=stalled_s)

    def check_open(self) -> None:
        """Refuse events while nothing could acknowledge them.

        Raises:
            FencedError: the epoch has ended.
            JournalError: stalled by the filesystem.
        """
        if self._closed:
            raise FencedError(f"epoch {self._epoch} has ended")
        if self.stalled_s:
            raise self.stalled()

    def close(self) -> None:
        """Write out what waits and let `run` return."""
        self._closed = True
        self._wake.set()
