"""Worker calls: leases by long poll, heartbeats and commits, each batched a worker."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from stages.errors import ServiceError
from stages.ledger import grants, outcomes
from stages.ledger.events import CommitItem, Committed, Heartbeat, Leased, MemberGone
from stages.ledger.fleet import Session
from stages.ledger.state import EVAL, INIT, RUN, STAGES, Lease
from stages.router.core import Router
from stages.router.metrics import Seconds
from stages.router.served import ServedTask
from stages.trajectory import RowRange, Sampling
from stages.wire import (
    CommitIn,
    CommitResult,
    CommitsIn,
    CommitsOut,
    EnvironmentOut,
    EvalInput,
    HeartbeatIn,
    HeartbeatOut,
    InitInput,
    LeaseIn,
    LeaseOut,
    LeasesOut,
    Revoked,
    RunInput,
    SessionOut,
)

REMEMBERED_GONE: Final = 10_000
"""Dead members whose parked requests are given nothing; ids are unique an incarnation."""
MESSAGE_MAX: Final = 2000
"""Characters of a failure's message that are journaled."""

_PATH = re.compile(r"(handoff|shards)/[A-Za-z0-9][A-Za-z0-9_.-]{0,200}")


class Budgets(msgspec.Struct, frozen=True):
    """Seconds of service of one attempt, a stage."""

    init_s: float
    run_s: float
    eval_s: float


class Leasing:
    """Answers workers on behalf of the router."""

    def __init__(self, router: Router, served: ServedTask, sampling: Sampling, budgets: Budgets) -> None:
        self._router, self._served = router, served
        self._sampling, self._budgets = sampling, budgets
        self.loads: dict[str, dict[str, Any]] = {}
        self.heard: dict[str, float] = {}
        """Member -> when it was last heard of, on the monotonic clock."""
        self.hand_over = False
        """Whether workers are to give back what they hold now: the router goes, and comes again later."""
        self.spent = {stage: Seconds() for stage in STAGES}
        """Service time of the attempts that ended, by stage."""
        self._gone: dict[str, None] = {}
        self.run_room: Callable[[], int] = lambda: 1 << 30
        """How many rollouts RUN may take more, by what the engines say of themselves."""
        self.uneasy: Callable[[list[str]], tuple[list[str], list[str]]] = lambda rollouts: ([], [])
        """Of these rollouts in RUN: who asks for its session again before its next turn, and whose replica is down."""
        self.offer: Callable[[str, int], asyncio.Future[Session] | None] = lambda rollout_id, attempt: None
        """A session for an attempt that RUN is about to be given."""
        self.session: Callable[[Session], SessionOut | None] = lambda session: None
        """A session as its worker needs it, or None where its replica has left."""

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._router.epoch:
            raise ServiceError(
                409, "stale_epoch", f"epoch {epoch} is over, the current one is {self._router.epoch}; read router.json",
                epoch=self._router.epoch, url=self._router.url,
            )  # fmt: skip

    async def lease(self, request: LeaseIn, has_left: Callable[[], Awaitable[bool]]) -> LeasesOut:
        """Grant up to `free` leases, waiting up to `wait_s` for the first; nothing to a caller that `has_left`."""
        self._check_epoch(request.epoch)
        self._router.check_open()
        self.heard[request.member] = time.monotonic()
        until = time.monotonic() + request.wait_s
        while True:
            if request.member in self._gone:
                self._router.wake_leases()  # what woke this request is somebody else's now
                raise ServiceError(409, "member_gone", f"{request.member} was reported dead: start under another id")
            if await has_left():
                self._router.wake_leases()
                return LeasesOut(self._router.epoch, [])
            free = min(request.free, self.run_room()) if request.stage == RUN else request.free
            work = grants.choose(self._router.ledger, request.stage, free, frozenset(request.warm))
            if work:
                event = Leased(t=self._router.clock(), member=request.member, stage=request.stage, work=work)
                durable = self._router.put(event)
                offered = self._offered(work) if request.stage == RUN else {}  # durable with the leases
                granted: list[Lease] = await self._router.durable(durable)
                sessions = {name: await self._router.durable(opened) for name, opened in offered.items()}
                leases = [await self._describe(lease, sessions.get(lease.work)) for lease in granted]
                return LeasesOut(self._router.epoch, [lease for lease in leases if lease is not None])
            left_s = until - time.monotonic()
            if left_s <= 0 or self._router.stopping or not await self._router.waiters.wait(request.stage, left_s):
                return LeasesOut(self._router.epoch, [])

    def _offered(self, work: list[str]) -> dict[str, asyncio.Future[Session]]:
        rollouts = self._router.ledger.state.rollouts
        offered = {name: self.offer(name, rollouts[name].attempt) for name in work}
        return {name: opened for name, opened in offered.items() if opened is not None}

    async def _describe(self, lease: Lease, session: Session | None) -> LeaseOut | None:
        """The lease as its worker needs it, or None where it was revoked meanwhile."""
        state = self._router.ledger.state
        if lease.id not in state.leases:
            return None
        if lease.stage == INIT:
            environment = state.environments[lease.work]
            rollout_id = next(iter(environment.waiting), lease.work)
            payload = environment.payload
        else:
            rollout_id = lease.work
            payload = state.groups[state.rollouts[lease.work].group].payload
        row = self._router.payloads.cached(payload)
        if row is None:
            row = await asyncio.to_thread(self._router.payloads.read, payload)
            if lease.id not in state.leases:
                return None
        body = self._init_input(lease, row) if lease.stage == INIT else self._rollout_input(lease, row, session)
        return LeaseOut(
            str(lease.id), rollout_id, lease.attempt, lease.stage,  # type: ignore[arg-type]
            round(lease.expires_at - state.now, 3), msgspec.Raw(msgspec.json.encode(body)),
        )  # fmt: skip

    def _init_input(self, lease: Lease, row: dict[str, Any]) -> InitInput:
        _, environment = self._served.environment(row)
        description = EnvironmentOut(lease.work, environment.image, environment.setup_key)
        return InitInput(description, self._served.public(row), self._budgets.init_s)

    def _rollout_input(self, lease: Lease, row: dict[str, Any], session: Session | None) -> RunInput | EvalInput:
        state = self._router.ledger.state
        rollout = state.rollouts[lease.work]
        group = state.groups[rollout.group]
        layer = state.environments[group.environment].layer
        layers = [layer] if layer else []
        if lease.stage == RUN:
            return RunInput(
                self._served.for_agent(row), layers, group.sampling or self._sampling, self._budgets.run_s,
                group.id, group.task_id, group.tag, rollout.checkpoint,
                None if session is None else self.session(session),
            )  # fmt: skip
        assert rollout.segment is not None
        return EvalInput(
            row, layers, rollout.segment, self._budgets.eval_s, group.id, group.task_id, group.tag, rollout.outcome,
            rollout.message, rollout.failures + rollout.losses, rollout.accepted_at, rollout.queue_init_s,
            rollout.init_s, rollout.queue_run_s, rollout.queue_eval_s,
        )  # fmt: skip

    async def heartbeat(self, request: HeartbeatIn) -> HeartbeatOut:
        """Renew what the member still holds and tell it what it no longer does."""
        self._check_epoch(request.epoch)
        self.loads[request.member], self.heard[request.member] = request.load, time.monotonic()
        leases = [_lease_number(lease_id) for lease_id in request.leases]
        reasons = self._router.revoked.pop(request.member, {})
        event = Heartbeat(t=self._router.clock(), member=request.member, leases=leases)
        renewed, unknown = await self._router.submit(event) if leases else ([], [])
        for lease in unknown:
            reasons.setdefault(lease, "the lease has ended")
        state = self._router.ledger.state
        held = (state.leases.get(lease) for lease in renewed)
        moved, lost = self.uneasy([lease.work for lease in held if lease is not None and lease.stage == RUN])
        return HeartbeatOut(
            self._router.epoch, [str(lease) for lease in renewed],
            [Revoked(str(lease), reason) for lease, reason in reasons.items()], self.hand_over, state.policy_version,
            moved, lost,
        )  # fmt: skip

    async def commit(self, request: CommitsIn) -> CommitsOut:
        """Take in results; the answer comes after they are durable."""
        self._check_epoch(request.epoch)
        self._router.check_open()
        items = [self._item(commit) for commit in request.commits]
        event = Committed(t=self._router.clock(), member=request.member, commits=items)
        statuses = await self._router.submit(event)
        return CommitsOut(
            [CommitResult(c.lease_id, status) for c, status in zip(request.commits, statuses, strict=True)]
        )

    def _item(self, commit: CommitIn) -> CommitItem:
        if not outcomes.is_known(commit.outcome):
            raise ServiceError(400, "invalid", f"commits.outcome: {commit.outcome!r} is not a failure class or 'ok'")
        for field, place in (("segment", commit.segment), ("row", commit.row), ("checkpoint", commit.checkpoint)):
            if place is not None and not _PATH.fullmatch(place.path):
                message = f"commits.{field}.path: {place.path!r} is no file of handoff/ or shards/"
                raise ServiceError(400, "invalid", message)
        lease = self._router.ledger.state.leases.get(_lease_number(commit.lease_id))
        if lease is not None:
            self._check_result(commit, lease)
            if commit.outcome not in (outcomes.CHECKPOINT, outcomes.GIVEN_BACK):
                self.spent[lease.stage].add(commit.timing.service_s)
        row, timing = commit.row, commit.timing
        return CommitItem(
            lease=_lease_number(commit.lease_id), outcome=commit.outcome, final=commit.final,
            message=commit.message[:MESSAGE_MAX],
            layer=commit.layer, cached=commit.cached, segment=commit.segment, chains=row.chains if row else 0,
            row=RowRange(row.path, row.offset, row.length, row.crc32) if row else None,
            reward=row.reward if row else None, tokens=row.tokens if row else 0,
            min_policy_version=row.min_policy_version if row else commit.min_policy_version,
            checkpoint=commit.checkpoint, wasted_tokens=commit.wasted_tokens,
            service_s=round(timing.service_s, 4), llm_s=round(timing.llm_s, 4), tool_s=round(timing.tool_s, 4),
        )  # fmt: skip

    def _check_result(self, commit: CommitIn, lease: Lease) -> None:
        """A result without the bytes that it claims would leave a rollout that nobody can read."""
        if commit.outcome == outcomes.CHECKPOINT and (lease.stage != RUN or commit.checkpoint is None):
            raise ServiceError(400, "invalid", "commits.checkpoint: outcome 'checkpoint' is RUN's and names a range")
        known = outcomes.OUTCOMES.get(commit.outcome)
        if known is None or known.status != "completed":
            return
        missing = {INIT: commit.layer, RUN: commit.segment, EVAL: commit.row}[lease.stage] is None
        if missing:
            field = {INIT: "layer", RUN: "segment", EVAL: "row"}[lease.stage]
            raise ServiceError(400, "invalid", f"commits.{field}: outcome {commit.outcome!r} of {lease.stage} needs it")

    async def gone(self, member: str, reason: str) -> int:
        """A member is dead: its leases are free at once."""
        self._gone[member] = None
        if len(self._gone) > REMEMBERED_GONE:
            del self._gone[next(iter(self._gone))]
        freed: int = await self._router.submit(MemberGone(t=self._router.clock(), member=member, reason=reason))
        self.loads.pop(member, None)
        self.heard.pop(member, None)
        self._router.revoked.pop(member, None)
        return freed


def _lease_number(lease_id: str) -> int:
    if not (lease_id.isascii() and lease_id.isdecimal() and len(lease_id) <= 18):
        raise ServiceError(400, "invalid", f"lease_id: {lease_id!r} is not a lease of this run")
    return int(lease_id)
