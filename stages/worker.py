"""The body of every worker: leases in, one task a lease, results out in batches, one heartbeat for all of them."""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from sandbox.errors import SandboxError
from stages.errors import RolloutError, RouterUnreachableError, ServiceError
from stages.http import RouterLink
from stages.ledger.outcomes import CHECKPOINT, GIVEN_BACK, OUTCOMES
from stages.slots import Slots
from stages.trajectory import CheckpointRange, RowRange
from stages.wire import (
    CommitIn,
    CommitRow,
    CommitsIn,
    CommitsOut,
    CommitTiming,
    HeartbeatIn,
    HeartbeatOut,
    LeaseIn,
    LeaseOut,
    LeasesOut,
    Stage,
)

POLL_S: Final = 20.0
COMMIT_BATCH: Final = 256
GATHER_S: Final = 0.01
"""Time for further results before some are sent: they hold no slot, and each request costs the router the same."""
SLOT_GATHER_S: Final = 0.004
"""Time for further slots to come free before leases are asked for, where most of them are busy."""
AHEAD_GATHER_S: Final = 0.02  # the same where leases are there already for those that come free meanwhile
FLUSH_S: Final = 5.0
MESSAGE_MAX: Final = 2000

log = logging.getLogger(__name__)


Keep = Callable[[LeaseOut, CheckpointRange], None]
Leave = Callable[[LeaseOut], None]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage made of a lease; becomes a commit."""

    outcome: str = "ok"
    final: bool = False
    message: str = ""
    layer: str | None = None
    cached: bool = False
    segment: RowRange | None = None
    row: CommitRow | None = None
    min_policy_version: int | None = None
    checkpoint: CheckpointRange | None = None
    wasted_tokens: int = 0
    llm_s: float = 0.0
    tool_s: float = 0.0


class Stagehand(Protocol):
    """One stage's work on one lease; what it must not need to know of checkpoints has a body here."""

    timeout_class: str
    """The failure class of a lease that used up its budget."""

    @property
    def warm(self) -> list[str]:
        """Layer digests that are unpacked on this node."""
        ...

    async def work(self, lease: LeaseOut) -> Result:
        """Do it; raises RolloutError or SandboxError where a boundary broke."""
        ...

    def attach(self, keep: Keep) -> None:
        """Learn how a checkpoint is committed while its lease goes on."""
        return

    def leaves(self, leave: Leave) -> None:
        """Learn how a lease gives up its slot before its work returns: what is left of it is writing alone."""
        return

    def drain(self, grace_s: float) -> None:
        """The worker ends within `grace_s`: bring work to where another can go on with it."""
        return

    def sessions(self, moved: Sequence[str], lost: Sequence[str]) -> None:
        """Rollouts whose session with the fleet moves at its next turn, and those whose replica is down."""
        return


class Worker:
    """Runs one stage's leases in `slots` at once until told to drain."""

    def __init__(
        self, link: RouterLink, hand: Stagehand, *, member: str, stage: Stage, slots: int, heartbeat_s: float
    ) -> None:
        self._link, self._hand = link, hand
        self._member, self._stage, self._heartbeat_s = member, stage, heartbeat_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._results: asyncio.Queue[CommitIn] = asyncio.Queue()
        self._unacknowledged: set[str] = set()
        self._revoked: set[str] = set()
        self._slot_free = asyncio.Event()
        self._slots = Slots(slots, self._slot_free.set)
        self._draining = asyncio.Event()
        self._abandoned = False
        hand.attach(self._keep)
        hand.leaves(lambda lease: self._slots.leave(lease.lease_id))

    def abandon(self) -> None:
        """Give every lease back at once: what runs below this process was struck by the same signal as it."""
        self._abandoned = True
        self.drain()
        for task in self._tasks.values():
            asyncio.get_running_loop().call_soon(task.cancel)  # after its first step: before it, nobody could answer

    def drain(self) -> None:
        """Take no more leases; `run` returns when the present ones are done."""
        self._draining.set()
        self._slot_free.set()
        self._slots.close()

    async def run(self, *, grace_s: float, term: Literal["drain", "abandon"] = "drain") -> None:
        """Work until drained; what is not done `grace_s` after that is handed back."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGUSR2):
            loop.add_signal_handler(number, self.drain)
        loop.add_signal_handler(signal.SIGTERM, self.abandon if term == "abandon" else self.drain)
        heartbeat = asyncio.create_task(self._heartbeats(), name="heartbeat")
        committing = asyncio.create_task(self._commits(), name="commits")
        leasing = asyncio.create_task(self._leases(), name="leases")
        try:
            await self._until_drained({heartbeat, committing, leasing})
            leasing.cancel()
            if not self._abandoned:
                self._hand.drain(grace_s)
            if self._tasks:
                await asyncio.wait(set(self._tasks.values()), timeout=grace_s)
            for task in list(self._tasks.values()):
                task.cancel()
            if self._tasks:
                await asyncio.wait(set(self._tasks.values()))
            await self._flush()
        finally:
            for task in (heartbeat, committing, leasing, *self._tasks.values()):
                task.cancel()

    async def _flush(self) -> None:
        """Let the last results be acknowledged; where no router takes them, their rollouts run again elsewhere."""
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._results.join()
        except TimeoutError:
            log.warning("%s: %d results were not taken by any router", self._stage, len(self._unacknowledged))

    async def _until_drained(self, loops: set[asyncio.Task[None]]) -> None:
        """Wait for the drain; a loop that ends before it has failed, and the worker with it."""
        draining = asyncio.create_task(self._draining.wait())
        done, _ = await asyncio.wait({draining, *loops}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        for task in done & loops:
            task.result()

    # -- leases -------------------------------------------------------------------------------------------------------

    async def _leases(self) -> None:
        while not self._draining.is_set():
            free = self._slots.wanted()
            if free <= 0:
                self._slot_free.clear()
                await self._slot_free.wait()
                full = self._slots.busy == self._slots.count  # those that came free have their next lease already
                await asyncio.sleep(AHEAD_GATHER_S if full else SLOT_GATHER_S)
                continue
            for lease in await self._ask(free):
                self._slots.enter(lease.lease_id)
                task = asyncio.create_task(self._work(lease), name=lease.rollout_id)
                self._tasks[lease.lease_id] = task
                task.add_done_callback(functools.partial(self._done, lease.lease_id))

    def _done(self, lease_id: str, _: asyncio.Task[None]) -> None:
        del self._tasks[lease_id]
        self._revoked.discard(lease_id)
        self._slots.forget(lease_id)
        self._slot_free.set()

    async def _ask(self, free: int) -> list[LeaseOut]:
        def body() -> LeaseIn:
            return LeaseIn(
                member=self._member, epoch=self._link.epoch, stage=self._stage, free=free, warm=self._hand.warm,
                wait_s=POLL_S,
            )  # fmt: skip

        answer: LeasesOut = await self._call("POST", "/v1/lease", body, LeasesOut, timeout_s=POLL_S + 30)
        return answer.leases

    async def _call(self, method: str, path: str, body: Callable[[], Any], answer: type[Any], timeout_s: float) -> Any:
        """A call in the current epoch: a newer router is found and asked again."""
        while True:
            if self._link.epoch == 0:
                await self._link.call("GET", "/healthz", answer=bytes)
            try:
                return await self._link.call(method, path, body(), answer=answer, timeout_s=timeout_s)
            except ServiceError as error:
                if error.code != "stale_epoch":
                    raise
                await self._link.on_stale_epoch()

    async def _work(self, lease: LeaseOut) -> None:
        result = await self._attempt(lease)
        if result is None:
            return
        timing = CommitTiming(self._slots.spent_s(lease.lease_id), result.llm_s, result.tool_s)
        self._unacknowledged.add(lease.lease_id)
        self._results.put_nowait(
            CommitIn(
                lease_id=lease.lease_id,
                rollout_id=lease.rollout_id,
                attempt=lease.attempt,
                outcome=result.outcome,
                final=result.final,
                message=_sendable(result.message),
                layer=result.layer,
                cached=result.cached,
                segment=result.segment,
                min_policy_version=result.min_policy_version,
                row=result.row,
                checkpoint=result.checkpoint,
                wasted_tokens=result.wasted_tokens,
                timing=timing,
            )
        )

    def _keep(self, lease: LeaseOut, checkpoint: CheckpointRange) -> None:
        """Commit a checkpoint of a lease that goes on."""
        self._results.put_nowait(
            CommitIn(
                lease_id=lease.lease_id, rollout_id=lease.rollout_id, attempt=lease.attempt, outcome=CHECKPOINT,
                checkpoint=checkpoint,
            )
        )  # fmt: skip

    async def _attempt(self, lease: LeaseOut) -> Result | None:
        """One lease to its result; None where the lease was revoked. The named boundary between rollouts and worker."""
        try:
            if not await self._slots.turn(lease.lease_id):
                return Result(message="the worker drained before its turn", outcome=GIVEN_BACK)
            return await self._hand.work(lease)
        except asyncio.CancelledError:
            if not self._draining.is_set():
                return None
            return Result(outcome=GIVEN_BACK, message="the worker drained")
        except RolloutError as error:
            log.warning("%s %s: %s: %s", self._stage, lease.rollout_id, error.failure_class, error)
            # What ends a trajectory comes with its bytes, as a result; raised, it is a fault like any other.
            ended = OUTCOMES[error.failure_class].status == "completed"
            outcome = "infrastructure" if ended else error.failure_class
            return Result(outcome=outcome, message=str(error), final=bool(error.detail.get("final")))
        except SandboxError as error:
            log.warning("%s %s: sandbox: %s", self._stage, lease.rollout_id, error)
            return Result(outcome="sandbox", message=str(error))
        except TimeoutError as error:
            return Result(
                outcome=self._hand.timeout_class, message=str(error) or f"{self._stage} ran out of its budget"
            )
        except (RouterUnreachableError, ServiceError) as error:
            return Result(outcome="infrastructure", message=str(error))
        except Exception as error:  # a rollout's fault is data; the worker and its other rollouts go on
            log.exception("%s %s", self._stage, lease.rollout_id)
            return Result(outcome="infrastructure", message=f"{type(error).__name__}: {error}")

    # -- commits and heartbeats ---------------------------------------------------------------------------------------

    async def _commits(self) -> None:
        while True:
            batch = [await self._results.get()]
            if self._tasks:
                await asyncio.sleep(GATHER_S)
            while not self._results.empty() and len(batch) < COMMIT_BATCH:
                batch.append(self._results.get_nowait())

            await self._commit(batch)
            for commit in batch:
                if commit.outcome != CHECKPOINT:
                    self._unacknowledged.discard(commit.lease_id)
                self._results.task_done()

    async def _commit(self, batch: list[CommitIn]) -> None:
        """Send results; where the router cannot make sense of one, the others must not suffer for it."""

        def body() -> CommitsIn:
            return CommitsIn(member=self._member, epoch=self._link.epoch, commits=batch)

        try:
            answer: CommitsOut = await self._call("POST", "/v1/commit", body, CommitsOut, timeout_s=60)
        except ServiceError as error:
            if error.status != 400 or (len(batch) == 1 and batch[0].outcome == "infrastructure"):
                raise
            log.error("%s: the router refused a result: %s", self._stage, error)
            if len(batch) == 1 and batch[0].outcome == CHECKPOINT:
                return  # nothing rests on it: its lease goes on
            for commit in batch:
                lone = commit if len(batch) > 1 else msgspec.structs.replace(
                    commit, outcome="infrastructure", message=f"refused by the router: {error}"
                )  # fmt: skip
                await self._commit([lone])
            return
        for result in answer.results:
            if result.status == "superseded":
                log.warning("%s: the result of lease %s came too late", self._stage, result.lease_id)

    async def _heartbeats(self) -> None:
        while True:
            sent = time.monotonic()
            await asyncio.sleep(self._heartbeat_s)
            lag_s = max(0.0, time.monotonic() - sent - self._heartbeat_s)
            load = {"slots": self._slots.count, "busy": self._slots.busy, "loop_lag_s": round(lag_s, 4)}

            def body(load: dict[str, Any] = load) -> HeartbeatIn:
                leases = [*self._tasks, *self._unacknowledged]
                return HeartbeatIn(member=self._member, epoch=self._link.epoch, leases=leases, load=load)

            # Far shorter than a lease: one that hangs must not be the reason why leases run out.
            timeout_s = self._heartbeat_s + 2.0
            answer: HeartbeatOut = await self._call("POST", "/v1/heartbeat", body, HeartbeatOut, timeout_s=timeout_s)
            if answer.drain and self._tasks:  # the router goes, and another comes later: nobody may hold what it knows
                self.drain()
            if answer.moved or answer.lost:
                self._hand.sessions(answer.moved, answer.lost)
            for revoked in answer.revoked:
                task = self._tasks.get(revoked.lease_id)
                if task is not None and revoked.lease_id not in self._revoked:
                    self._revoked.add(revoked.lease_id)
                    log.info("%s: lease %s revoked: %s", self._stage, revoked.lease_id, revoked.reason)
                    task.cancel()


def _sendable(message: str) -> str:
    """Any text as JSON can carry it: an agent's file names may hold bytes that are no UTF-8."""
    return message.encode("utf-8", "replace").decode()[:MESSAGE_MAX]
