"""When snapshots are taken: every so many events, and at a clean end. The image is a value; the rest is waiting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from stages.errors import JournalError
from stages.journal import snapshots
from stages.journal.snapshots import Header
from stages.journal.writer import Covered
from stages.layout import RunLayout
from stages.ledger import image
from stages.ledger.events import Part
from stages.ledger.machine import Ledger

EVERY_EVENTS: Final = 100_000
PATIENCE_S: Final = 60.0
"""A snapshot whose events are not published by then is given up: the next one comes soon enough."""

log = logging.getLogger(__name__)


Completed = Callable[[int, float], Awaitable[bool]]


class _Taken(NamedTuple):
    """The ledger's image, and what the files beside the journal must hold before it may be used."""

    body: bytes
    seq: int
    failed: int


def _taken(ledger: Ledger) -> _Taken:
    counts = ledger.state.counts
    return _Taken(image.encode(ledger), ledger.state.seq, counts.failed + counts.cancelled)


class Snapshotter:
    """Takes the ledger's image between two events and writes it once the journal and the index hold all of it.

    Args:
        layout: the run's paths.
        epoch: the router's own.
        history: the parts before this epoch.
        completed: waits until index and failures are durable up to a seq.
        finished: the segments still to be deleted.
        already: events that replay had to read, so that a long replay is not repeated.
    """

    def __init__(
        self, layout: RunLayout, epoch: int, history: Sequence[Part], completed: Completed,
        finished: Callable[[], list[str]], *, already: int = 0, every: int = EVERY_EVENTS,
    ) -> None:  # fmt: skip
        self._layout, self._epoch, self._history = layout, epoch, list(history)
        self._completed, self._finished, self._every = completed, finished, every
        self._since = already
        self._number = 0
        self._writing: asyncio.Task[None] | None = None

    def counted(self, ledger: Ledger) -> asyncio.Future[Covered] | None:
        """Call after each event; where a snapshot is due, the mark that has to go with this event into the journal."""
        self._since += 1
        if self._since < self._every or (self._writing is not None and not self._writing.done()):
            return None
        self._since = 0
        mark: asyncio.Future[Covered] = asyncio.get_running_loop().create_future()
        taken = _taken(ledger)
        self._writing = asyncio.create_task(self._when_durable(taken, mark), name="snapshot")
        return mark

    async def _when_durable(self, taken: _Taken, mark: asyncio.Future[Covered]) -> None:
        try:
            covered = await mark
        except JournalError:
            return  # the epoch has ended: its successor takes its own
        if await self._completed(taken.seq, PATIENCE_S):
            await self._write(taken, covered)

    async def _write(self, taken: _Taken, covered: Covered) -> None:
        header = Header(
            parts=[*self._history, *covered.parts], last_line=covered.last_line, seq=taken.seq, failed=taken.failed,
            finished=self._finished(), length=0, crc=0,
        )  # fmt: skip
        number, self._number = self._number, self._number + 1
        try:
            await asyncio.to_thread(snapshots.write, self._layout, self._epoch, number, header, taken.body)
        except OSError as error:
            log.warning("snapshot not written, the next restart takes longer: %s", error)

    async def close(self, ledger: Ledger, covered: Covered | None) -> None:
        """The last snapshot, of a journal that is closed and durable; None where it is not: then nothing is written."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        taken = _taken(ledger)
        if covered is not None and await self._completed(taken.seq, 0):
            await self._write(taken, covered)
