"""The router's heart: one ledger, one journal, one clock; what `submit` has returned is durable.

The event loop applies events one after the other, so a choice made from the state (`grants.choose`, `fleet.choose`) and
the event that makes it so are never pulled apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from stages import members
from stages.errors import JournalError, ServiceError
from stages.journal import fence
from stages.journal.fence import TIME, Fence, Probed
from stages.journal.history import claim, highest_claim
from stages.journal.payloads import Payloads
from stages.journal.writer import STALL_S, JournalWriter
from stages.layout import RunLayout
from stages.ledger.effects import Effect, Revoke
from stages.ledger.events import AnyEvent, Committed, EpochBegan, MemberGone, Part, Rules, Tick
from stages.ledger.machine import Ledger
from stages.ledger.state import RUN
from stages.router.clock import Clock
from stages.router.publisher import Publisher
from stages.router.reopen import reopen
from stages.router.segments import SegmentSweeper
from stages.router.snapshotting import EVERY_EVENTS, Snapshotter
from stages.router.waiters import Waiters

TICK_S: Final = 0.25
STALL_CHECK_S: Final = 1.0
GAP_S: Final = 1.0
"""A tick later than this means that the router itself stood still: no worker is to pay for that."""


class Router:
    """Holds one epoch of a run. Use `opened` as an async context manager."""

    def __init__(self, layout: RunLayout, run_id: str, rules: Rules, node: str) -> None:
        self.layout, self.run_id, self.rules, self.node = layout, run_id, rules, node
        self.ledger = Ledger()
        self.payloads = Payloads(layout)
        self.publisher = Publisher(layout)
        self.segments = SegmentSweeper(layout)
        self.waiters = Waiters()
        self.stopping = False
        self.url = ""
        self.revoked: dict[str, dict[int, str]] = {}
        self.clock = Clock()
        self.epoch = 0
        self.started = time.monotonic()
        self.lag_s: list[float] = []
        self.run_room: Callable[[], int] = lambda: 1 << 30
        """How many rollouts RUN may take more: no more of its polls are woken."""
        self.replayed = 0
        self.probed = Probed("", "")
        self.fence = Fence(layout, 0)
        self._journal: JournalWriter | None = None
        self._snapshots: Snapshotter | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(
        cls, layout: RunLayout, run_id: str, rules: Rules, node: str, *,
        stall_s: float = STALL_S, snapshot_events: int = EVERY_EVENTS,
    ) -> AsyncIterator[Router]:  # fmt: skip
        """Claim the next epoch, replay what came before, and keep journal and clock running inside the block.

        Raises:
            FencedError: another router claimed the epoch, now or later.
            JournalError: the history is damaged.
        """
        router = cls(layout, run_id, rules, node)
        history = await asyncio.to_thread(router._reopen)
        router._journal = JournalWriter(
            layout, router.epoch, router.payloads, router._durable, fence=router.fence, stall_s=stall_s
        )
        snapshots = router._snapshots = Snapshotter(
            layout, router.epoch, history, router.publisher.completed, router.segments.waiting,
            already=router.replayed, every=snapshot_events,
        )  # fmt: skip
        began = EpochBegan(t=router.clock(), epoch=router.epoch, run_id=run_id, history=history, rules=rules, node=node)
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(router._journal.run(), name="journal")
            await router.submit(began)
            await asyncio.to_thread(router.publisher.begin, router.epoch)
            publishing = tasks.create_task(router.publisher.run(), name="publish")
            ticking = tasks.create_task(router._tick(), name="tick")
            try:
                yield router
            finally:
                ticking.cancel()
                router._journal.close()
                await asyncio.wait([writing])
                await asyncio.to_thread(router._delete_segments)
                router.publisher.close()
                await asyncio.wait([publishing])
                await snapshots.close(router.ledger, router._journal.covered())
                router.publisher.close_files()
                router.payloads.close()

    def _reopen(self) -> list[Part]:
        self.probed = fence.probe(self.layout)
        self.epoch = highest_claim(self.layout) + 1
        claim(self.layout, self.epoch, self.node)
        self.fence = Fence(self.layout, self.epoch, self.rules.lease_ttl_s / 2 if self.probed.kind == TIME else None)
        self.payloads.load()
        self.payloads.begin(self.epoch)
        reopened = reopen(self.layout, self.publisher, self.segments)
        self.ledger, self.replayed = reopened.ledger, reopened.replayed
        self.clock = Clock(self.ledger.state.now)
        return reopened.history

    def _delete_segments(self) -> None:
        self.segments.delete(self.segments.all_due(self.ledger.state, members.names(self.layout)))

    @property
    def journal(self) -> JournalWriter:
        """The open journal."""
        assert self._journal is not None
        return self._journal

    def check_open(self) -> None:
        """Refuse a request that could not be acknowledged.

        Raises:
            ServiceError: 503 journal_stalled.
        """
        try:
            self.journal.check_open()
        except JournalError as error:
            raise ServiceError(503, "journal_stalled", str(error), retry_after_s=2) from error

    async def submit(self, event: AnyEvent) -> Any:
        """Apply an event and return its reply once it is durable.

        Raises:
            JournalError: it did not become durable in time. It stands all the same and may become so later: whoever
                asks again must be ready to hear that it has happened.
        """
        return await self._in_time(self.put(event))

    async def settled(self) -> None:
        """Return once everything that the ledger knows now is durable; an answer made from its state waits for this.

        Raises:
            JournalError: that took too long.
        """
        await self._in_time(self.journal.settled())

    async def durable(self, event: asyncio.Future[Any]) -> Any:
        """The reply of an event that was `put`, once it is durable.

        Raises:
            JournalError: see `submit`.
        """
        return await self._in_time(event)

    async def _in_time(self, durable: asyncio.Future[Any]) -> Any:
        while True:
            done, _ = await asyncio.wait([durable], timeout=STALL_CHECK_S)
            if done:
                return durable.result()
            if self.journal.stalled_s:
                raise self.journal.stalled()

    def put(self, event: AnyEvent) -> asyncio.Future[Any]:
        """Apply an event now; the future gives its reply when it is durable."""
        reply, effects = self.ledger.apply(event)
        self._take_revocations(effects)
        self.wake_leases()
        if isinstance(event, Committed):
            self.segments.committed(event)
        elif isinstance(event, MemberGone):
            self.segments.gone(event.member)
        mark = self._snapshots.counted(self.ledger) if self._snapshots is not None else None
        return self.journal.put(event, reply, effects, mark)

    def _durable(self, effects: list[Effect]) -> None:
        """What follows from events once nothing can undo them."""
        self.publisher.take(effects)
        self.segments.take(effects)

    def stop(self) -> None:
        """Answer long polls now: the router is about to leave."""
        self.stopping = True
        self.waiters.wake_all()
        self.publisher.wake_all()

    def _take_revocations(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Revoke):
                self.revoked.setdefault(effect.member, {})[effect.lease] = effect.reason

    def wake_leases(self) -> None:
        """Let as many long polls look as there is work queued."""
        for stage, queue in self.ledger.queues.by_stage.items():
            if self.waiters.parked(stage) and (queued := len(queue)):
                self.waiters.wake(stage, min(queued, self.run_room()) if stage == RUN else queued)

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            if self.journal.busy_s > GAP_S:
                continue  # heartbeats are not answered either: all of this becomes a gap, for which no lease pays
            now = time.monotonic()
            late_s, last = now - last - TICK_S, now
            self.lag_s.append(late_s)
            del self.lag_s[:-4096]
            gap_s = round(late_s, 3) if late_s > GAP_S else 0.0
            t = self.clock()
            if gap_s or self.ledger.due(t):
                await self.put(Tick(t=t, gap_s=gap_s))
            if unneeded := self.segments.due(self.ledger.state):
                await asyncio.to_thread(self.segments.delete, unneeded)
