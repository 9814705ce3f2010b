"""The fleet's calls: replicas join, leave and are probed; sessions are assigned to them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from stages.errors import ServiceError
from stages.ledger.events import PolicyChanged, ReplicaChanged, SessionClosed, SessionOpened
from stages.ledger.fleet import DOWN, READY, Session
from stages.ledger.state import LEASED, RUN
from stages.router.core import Router
from stages.wire import PolicyIn, ReplicaIn, SessionIn, SessionOut

PROBE_S: Final = 1.0
FAILURES_TO_EJECT: Final = 2
SESSION_WAIT_S: Final = 10.0
"""How long a session request waits for a ready replica before 503 tells the worker to ask again."""

Probe = Callable[[str], Awaitable[bool]]


class Replicas:
    """Answers for the fleet on behalf of the router. `probe` asks one replica's URL whether it is healthy."""

    def __init__(self, router: Router, probe: Probe) -> None:
        self._router, self._probe = router, probe
        self._failures: dict[str, int] = {}

    def listing(self) -> list[dict[str, Any]]:
        """All replicas, as status shows them."""
        return [
            {
                "id": r.id, "url": r.url, "model": r.model, "capacity": r.capacity, "state": r.health,
                "sessions": r.in_flight, "sessions_total": r.sessions_total, "reason": r.reason or None,
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
        await self._router.submit(event)
        self._failures.pop(replica_id, None)
        self._router.waiters.wake("replica", 1 << 30)
        return {"id": replica_id}

    async def leave(self, replica_id: str) -> dict[str, Any]:
        """Drain: no new sessions; gone when the last one ends."""
        if replica_id not in self._router.ledger.state.fleet.replicas:
            raise ServiceError(404, "not_found", f"replica {replica_id!r} is not in the fleet")
        await self._change(replica_id, "drain", "asked")
        return {"id": replica_id, "state": "draining"}

    async def remove(self, replica_id: str, reason: str) -> None:
        """The replica's process has ended: its sessions are open to be assigned anew."""
        if replica_id in self._router.ledger.state.fleet.replicas:
            await self._change(replica_id, "leave", reason)

    async def _change(self, replica_id: str, change: str, reason: str) -> None:
        await self._router.submit(
            ReplicaChanged(t=self._router.clock(), replica=replica_id, change=change, reason=reason)
        )

    async def open_session(self, request: SessionIn) -> SessionOut:
        """Assign an attempt to a replica, or say again which one it has."""
        until = time.monotonic() + SESSION_WAIT_S
        if request.failed is not None:
            await self._probe_one(request.failed)
        while True:
            self._check_attempt(request)
            fleet = self._router.ledger.state.fleet
            session = fleet.usable(request.rollout_id, request.attempt)
            if session is None and (replica_id := fleet.choose()) is not None:
                event = SessionOpened(
                    t=self._router.clock(), rollout_id=request.rollout_id, attempt=request.attempt, replica=replica_id
                )
                session = await self._router.submit(event)
            if session is not None:
                return self._answer(session)
            left_s = until - time.monotonic()
            if left_s <= 0 or self._router.stopping or not await self._router.waiters.wait("replica", left_s):
                raise ServiceError(503, "no_replica", "no replica of the fleet is ready; ask again", retry_after_s=1)

    def _answer(self, session: Session) -> SessionOut:
        state = self._router.ledger.state
        replica = state.fleet.replicas.get(session.replica)
        if replica is None:
            raise ServiceError(503, "no_replica", "the replica has just left; ask again", retry_after_s=0)
        return SessionOut(str(session.id), replica.id, replica.url, state.policy_version)

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
        """Take note of the trainer's new version; pushing weights to the fleet is not built yet."""
        current = self._router.ledger.state.policy_version
        if request.version <= current:
            raise ServiceError(409, "not_newer", f"version: {request.version} is not above the current {current}")
        if request.weights_path is not None:
            raise ServiceError(501, "not_built", "weights_path: loading weights is not built yet; give null")
        event = PolicyChanged(t=self._router.clock(), version=request.version, mode=request.mode)
        await self._router.submit(event)
        return {"version": request.version, "replicas": self.policy_view()}

    async def watch(self) -> None:
        """Probe every replica about once a second; ends by cancellation."""
        while True:
            await asyncio.sleep(PROBE_S)
            replicas = list(self._router.ledger.state.fleet.replicas)
            await asyncio.gather(*(self._probe_one(replica_id) for replica_id in replicas))

    async def _probe_one(self, replica_id: str) -> None:
        replica = self._router.ledger.state.fleet.replicas.get(replica_id)
        if replica is None:
            return
        healthy = await self._probe(replica.url)
        failures = 0 if healthy else self._failures.get(replica_id, 0) + 1
        self._failures[replica_id] = failures
        if healthy and replica.health == DOWN:
            await self._change(replica_id, "ready", "")
            self._router.waiters.wake("replica", 1 << 30)
        elif failures >= FAILURES_TO_EJECT and replica.health == READY:
            await self._change(replica_id, "down", f"{failures} probes of {replica.url}/health failed")
