"""The fleet's calls: replicas join, leave and are probed; sessions are assigned to them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Literal

import msgspec

from stages.errors import ServiceError
from stages.ledger.events import ReplicaChanged, SessionClosed, SessionOpened
from stages.ledger.fleet import DOWN, READY, Replica, Session, Way
from stages.ledger.state import LEASED, RUN
from stages.router.core import Router
from stages.router.flow import Flow
from stages.router.policy import PolicyKeeper
from stages.router.readings import Pressure, Reading
from stages.wire import PolicyIn, ReplicaIn, SessionIn, SessionOut

PROBE_S: Final = 1.0
READ_S: Final = 2.0
READS_AT_ONCE: Final = 16
"""Looks at /metrics that are under way together, so that a large fleet is read in a trickle."""
FAILURES_TO_EJECT: Final = 2
SESSION_WAIT_S: Final = 10.0
"""How long a session request waits for a ready replica before 503 tells the worker to ask again."""

Probe = Callable[[str], Awaitable[bool]]
Read = Callable[[str], Awaitable[Reading | None]]


class FleetRules(msgspec.Struct, frozen=True, kw_only=True):
    """How the fleet is used; the keys of `fleet.*` say the same."""

    way: Way = "sticky"
    kv_gate: float = 0.9
    move_above: float = 0.0
    sync: Literal["together", "rolling"] = "together"
    steer: bool = True
    hold: bool = False
    """Whether RUN gets no lease while no replica of which this router knows that it is alive is ready."""
    allow_tied: bool = True
    """Whether tied embeddings survive a reload: they do in the embedded engine, in vLLM 0.32 they do not."""


async def _nothing(url: str) -> Reading | None:
    return None


class Replicas:
    """Answers for the fleet on behalf of the router.

    Args:
        router: whose ledger knows the fleet.
        probe: asks one replica's URL whether it is healthy.
        read: asks one replica's URL for its figures; None where it has none.
        rules: how the fleet is used.
    """

    def __init__(self, router: Router, probe: Probe, read: Read = _nothing, rules: FleetRules | None = None) -> None:
        self._router, self._probe, self._read = router, probe, read
        self.rules = rules or FleetRules()
        self.policy: PolicyKeeper | None = None
        self.pressure = Pressure(self.rules.kv_gate)
        self.flow = Flow()
        self._failures: dict[str, int] = {}
        self._seen: set[str] = set()
        """Replicas that were healthy in this router's own life: the journal's word may be of an older one."""
        self._asked: dict[str, float] = {}
        self._moving: set[str] = set()
        self._catching_up: dict[str, asyncio.Task[None]] = {}

    def listing(self) -> list[dict[str, Any]]:
        """All replicas, as status shows them."""
        readings, over = self.pressure.readings, self.pressure.over(time.monotonic())
        return [
            {
                "id": r.id, "url": r.url, "model": r.model, "capacity": r.capacity, "state": r.health,
                "sessions": r.in_flight, "sessions_total": r.sessions_total, "reason": r.reason or None,
                "version": r.version, "kv_usage": readings[r.id].kv_usage if r.id in readings else None,
                "over": r.id in over,
            }
            for r in self._router.ledger.state.fleet.replicas.values()
        ]  # fmt: skip

    def policy_view(self) -> list[dict[str, Any]]:
        """Which replicas serve the current policy, as GET and POST /v1/policy show them."""
        replicas = self._router.ledger.state.fleet.replicas.values()
        return [{"id": r.id, "ok": r.health == READY, "error": r.reason or None} for r in replicas]

    async def join(self, request: ReplicaIn) -> dict[str, Any]:
        """A replica offers itself; one of the same URL is replaced."""
        replica_id = request.id or "replica-" + hashlib.sha256(request.url.encode()).hexdigest()[:8]
        event = ReplicaChanged(
            t=self._router.clock(), replica=replica_id, change="join", url=request.url.rstrip("/"), model=request.model,
            capacity=request.capacity,
        )  # fmt: skip
        joined = self._router.put(event)
        self._failures.pop(replica_id, None)
        self._seen.add(replica_id)
        replica = self._router.ledger.state.fleet.replicas[replica_id]
        if self.policy is not None and self.policy.must_wait(replica):
            self._change(replica_id, "down", "has not loaded the current policy version yet")
            self._catch_up(replica)
        await self._router.durable(joined)
        self.woken()
        return {"id": replica_id}

    def woken(self) -> None:
        """A replica may have become ready: whoever waits for one looks again."""
        self._router.waiters.wake("replica", 1 << 30)
        self._router.wake_leases()

    async def leave(self, replica_id: str) -> dict[str, Any]:
        """Drain: no new sessions; gone when the last one ends."""
        if replica_id not in self._router.ledger.state.fleet.replicas:
            raise ServiceError(404, "not_found", f"replica {replica_id!r} is not in the fleet")
        await self._router.durable(self._change(replica_id, "drain", "asked"))
        return {"id": replica_id, "state": "draining"}

    async def remove(self, replica_id: str, reason: str) -> None:
        """The replica's process has ended: its sessions are open to be assigned anew."""
        self._seen.discard(replica_id)
        if replica_id in self._router.ledger.state.fleet.replicas:
            await self._router.durable(self._change(replica_id, "leave", reason))

    def _change(self, replica_id: str, change: str, reason: str) -> asyncio.Future[Any]:
        """So from now on; what the router finds by itself waits for no filesystem, which may stand still."""
        event = ReplicaChanged(t=self._router.clock(), replica=replica_id, change=change, reason=reason)
        return self._router.put(event)

    async def open_session(self, request: SessionIn) -> SessionOut:
        """Assign an attempt to a replica, or say again which one it has."""
        until = time.monotonic() + SESSION_WAIT_S
        if request.failed is not None:
            await self._probe_one(request.failed)
        while True:
            self._check_attempt(request)
            session = self._kept(request)
            if session is None and (opened := self._open(request)) is not None:
                session = await self._router.durable(opened)
            if session is not None:
                self._asked[request.rollout_id] = time.monotonic()
                if (described := self.described(session)) is None:
                    raise ServiceError(503, "no_replica", "the replica has just left; ask again", retry_after_s=0)
                if self.policy is not None:
                    self.policy.renamed.discard(request.rollout_id)
                return described
            left_s = until - time.monotonic()
            if left_s <= 0 or self._router.stopping or not await self._router.waiters.wait("replica", left_s):
                raise ServiceError(503, "no_replica", "no replica of the fleet is ready; ask again", retry_after_s=1)

    def offer(self, rollout_id: str, attempt: int) -> asyncio.Future[Session] | None:
        """A session for an attempt that is being leased, so that it need not ask; None where it has to all the same."""
        if self.rules.way == "round_robin":
            return None
        opened = self._open(SessionIn(rollout_id=rollout_id, attempt=attempt))
        if opened is not None:
            self._asked[rollout_id] = time.monotonic()
        return opened

    def _open(self, request: SessionIn) -> asyncio.Future[Session] | None:
        """Assign a replica now, durable when the future gives the session; None where none is ready."""
        replica_id = self._choose(request)
        if replica_id is None:
            return None
        at, rollout_id = self._router.clock(), request.rollout_id
        event = SessionOpened(t=at, rollout_id=rollout_id, attempt=request.attempt, replica=replica_id)
        self.pressure.opened(replica_id)
        self._moving.discard(rollout_id)
        return self._router.put(event)

    def _kept(self, request: SessionIn) -> Session | None:
        """The session that the attempt goes on with, if it may stay where it is."""
        session = self._router.ledger.state.fleet.usable(request.rollout_id, request.attempt)
        if session is None or self.rules.way == "round_robin":
            return None
        left = request.rollout_id in self._moving
        if request.failed == session.replica and self.policy is not None:
            # Aborted by a swap, where others serve meanwhile: it goes on with one of them.
            left = left or self.policy.syncing.get(session.replica) == "abort"
        return None if left else session

    def _choose(self, request: SessionIn) -> str | None:
        state, key = self._router.ledger.state, ""
        avoid = self.pressure.avoided(time.monotonic())
        if self.policy is not None and self.policy.syncing:
            avoid = avoid | self.policy.syncing.keys()
        if self.rules.way == "prefix_hash":
            # Rollouts of one task begin with the same prompt.
            key = state.groups[state.rollouts[request.rollout_id].group].payload
        return state.fleet.choose(avoid, way=self.rules.way, key=key)

    def described(self, session: Session) -> SessionOut | None:
        """Where the attempt generates; None where its replica has left."""
        state = self._router.ledger.state
        if (replica := state.fleet.replicas.get(session.replica)) is None:
            return None
        weights = state.fleet.weights
        return SessionOut(
            str(session.id), replica.id, replica.url, state.policy_version, self.rules.way == "round_robin",
            state.rules.session_idle_s / 2, None if weights is None else weights.adapter,
        )  # fmt: skip

    def _check_attempt(self, request: SessionIn) -> None:
        rollout = self._router.ledger.state.rollouts.get(request.rollout_id)
        if rollout is None:
            raise ServiceError(404, "not_found", f"rollout {request.rollout_id!r} is not open")
        if (rollout.stage, rollout.state, rollout.attempt) != (RUN, LEASED, request.attempt):
            message = f"attempt {request.attempt} of {request.rollout_id!r} is over: attempt {rollout.attempt} "
            raise ServiceError(409, "superseded", message + f"is {rollout.state} at {rollout.stage}")

    async def close_session(self, session_id: str) -> dict[str, Any]:
        """Release a session before its rollout leaves RUN."""
        if not any(str(s.id) == session_id for s in self._router.ledger.state.fleet.sessions.values()):
            raise ServiceError(404, "not_found", f"session {session_id!r} is not open")
        await self._router.submit(SessionClosed(t=self._router.clock(), session=int(session_id)))
        return {"session_id": session_id, "state": "closed"}

    async def set_policy(self, request: PolicyIn) -> dict[str, Any]:
        """Make a version current on the whole fleet; see PolicyKeeper."""
        assert self.policy is not None
        await self.policy.set(request)
        return {"version": self._router.ledger.state.policy_version, "replicas": self.policy_view()}

    def uneasy(self, rollouts: list[str]) -> tuple[list[str], list[str]]:
        """Of these rollouts, whose leases were renewed: who asks again before its next turn, whose replica is down."""
        fleet, now = self._router.ledger.state.fleet, time.monotonic()
        lost = []
        for rollout_id in rollouts:
            session = fleet.sessions.get(rollout_id)
            if session is not None:
                self._asked[rollout_id] = now  # its worker is there: a generation may take longer than the idle time
            if session is not None and fleet.usable(rollout_id, session.attempt) is None:
                lost.append(rollout_id)
        asks = self._moving if self.policy is None else self._moving | self.policy.renamed
        return [rollout_id for rollout_id in rollouts if rollout_id in asks], lost

    def run_room(self) -> int:
        """How many rollouts RUN may take more."""
        if self.rules.hold and not self._manned():
            return 0
        if not self.rules.steer or self.flow.limit is None:
            return 1 << 30
        return self.flow.room(self._running())

    def _manned(self) -> bool:
        replicas = self._router.ledger.state.fleet.replicas
        return any(replicas[name].health == READY for name in self._seen if name in replicas)

    def _running(self) -> int:
        return sum(lease.stage == RUN for lease in self._router.ledger.state.leases.values())

    # -- watching -----------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Probe every replica about once a second and read its figures every other; ends by cancellation."""
        try:
            async with asyncio.TaskGroup() as tasks:
                if self.policy is not None:
                    tasks.create_task(self.policy.finish_pending(), name="pending policy")
                tasks.create_task(_every(READ_S, self.look), name="readings")
                tasks.create_task(_every(PROBE_S, self._probe_all), name="health")
        finally:
            # Cancelled in mid-swap they resume their engines, which needs the engines' client: it is waited for.
            late = list(self._catching_up.values())
            for task in late:
                task.cancel()
            if self.policy is not None:
                await self.policy.close()
            await asyncio.gather(*late, return_exceptions=True)

    async def _probe_all(self) -> None:
        await asyncio.gather(*map(self._probe_one, self._router.ledger.state.fleet.replicas))
        self._close_idle()

    async def _probe_one(self, replica_id: str) -> None:
        replica = self._router.ledger.state.fleet.replicas.get(replica_id)
        if replica is None:
            return
        healthy = await self._probe(replica.url)
        failures = 0 if healthy else self._failures.get(replica_id, 0) + 1
        self._failures[replica_id] = failures
        is_new = healthy and replica_id not in self._seen
        if healthy:
            self._seen.add(replica_id)
        if healthy and replica.health == DOWN:
            if self.policy is not None and self.policy.must_wait(replica):
                self._catch_up(replica)
                return
            self._change(replica_id, "ready", "")
            self.woken()
        elif is_new:
            self.woken()
        elif failures >= FAILURES_TO_EJECT and replica.health == READY:
            self._seen.discard(replica_id)
            self._change(replica_id, "down", f"{failures} probes of {replica.url}/health failed")

    def _catch_up(self, replica: Replica) -> None:
        """Beside the probes: loading weights takes as long as it takes."""
        assert self.policy is not None
        if replica.id not in self._catching_up:
            task = asyncio.create_task(self.policy.catch_up(replica), name=f"catch up {replica.id}")
            self._catching_up[replica.id] = task
            task.add_done_callback(lambda _: self._catching_up.pop(replica.id, None))

    async def look(self) -> None:
        """Read every replica's figures once, and draw the consequences."""
        fleet, gate = self._router.ledger.state.fleet, asyncio.Semaphore(READS_AT_ONCE)
        self.pressure.forget(self.pressure.readings.keys() - fleet.replicas.keys())

        async def one(replica: Replica) -> tuple[str, Reading] | None:
            async with gate:
                reading = await self._read(replica.url)
                stuck = None if self.policy is None else await self.policy.unpause(replica)
            if stuck is not None and replica.id in fleet.replicas and replica.health == READY:
                self._change(replica.id, "down", stuck)
            return None if reading is None else (replica.id, reading)

        found = await asyncio.gather(*(one(r) for r in list(fleet.replicas.values()) if r.health != DOWN))
        readings = dict(pair for pair in found if pair is not None)
        now = time.monotonic()
        for replica_id, reading in readings.items():
            replica = fleet.replicas.get(replica_id)
            if replica is not None:
                self.pressure.read(replica_id, reading, replica.in_flight, now)
        if self.rules.steer:
            queued = len(self._router.ledger.queues.by_stage[RUN])
            if self.flow.look(readings, self._running(), queued) == "grow":
                self._router.wake_leases()
        if self.rules.move_above > 0:
            self._moving = set(fleet.to_move(self.rules.move_above, self.pressure.over(now)))

    def _close_idle(self) -> None:
        """Close sessions of which nothing was heard for the idle time; who still has one asks again by then."""
        state, now = self._router.ledger.state, time.monotonic()
        for rollout_id in self._asked.keys() - state.fleet.sessions.keys():
            del self._asked[rollout_id]
        for rollout_id, session in list(state.fleet.sessions.items()):
            if now - self._asked.setdefault(rollout_id, now) > state.rules.session_idle_s:
                self._router.put(SessionClosed(t=self._router.clock(), session=session.id))


async def _every(period_s: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        await asyncio.sleep(period_s)
        await work()
