"""The fleet as the ledger sees it: replicas, sessions, and the sticky assignment of the one to the other.

A session goes to the ready replica with the fewest sessions in flight for its capacity; ties go to the one chosen
least recently, so idle replicas fill evenly and a newcomer gets its share without a stampede. The order is a heap whose
entries are stamped: a replica's entry counts only while its stamp is the replica's own.

Two other ways are there for comparison: `round_robin` takes the replica chosen least recently, whatever it carries;
`prefix_hash` gives every session of one key to one replica (rendezvous hashing, so a joiner takes only its own keys).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Container
from typing import Literal

import msgspec

READY, DOWN, DRAINING = "ready", "down", "draining"
Way = Literal["sticky", "round_robin", "prefix_hash"]
NOBODY: Container[str] = frozenset()
UNKNOWN = -1
"""The version of a replica that missed one: whatever it serves, it is not the current one."""


class Replica(msgspec.Struct):
    """One engine.

    Attributes:
        capacity: how many sessions it is meant to carry.
        chosen: the pick that it last was.
        version: the policy version that it was last given by this run; None before the first.
    """

    id: str
    url: str
    model: str
    capacity: int
    health: str = READY
    in_flight: int = 0
    chosen: int = 0
    stamp: int = 0
    sessions_total: int = 0
    reason: str = ""
    version: int | None = None

    @property
    def load(self) -> float:
        """Sessions in flight for its capacity."""
        return self.in_flight / self.capacity


class Weights(msgspec.Struct, frozen=True):
    """A policy version and where its weights are; no path: the trainer loads them itself. `adapter` names a LoRA."""

    version: int
    path: str | None = None
    mode: str = "keep"
    adapter: str | None = None


class Session(msgspec.Struct, frozen=True):
    """One attempt of a rollout on one replica."""

    id: int
    rollout_id: str
    attempt: int
    replica: str


class Fleet(msgspec.Struct):
    """Replicas by id, sessions by rollout id.

    `weights` are those of the current policy version; `swap` what is being loaded now, whose outcome is not known yet.
    """

    replicas: dict[str, Replica] = {}
    sessions: dict[str, Session] = {}
    picks: int = 0
    next_session: int = 1
    heap: list[tuple[float, int, str, int]] = []
    weights: Weights | None = None
    swap: Weights | None = None

    def choose(self, avoid: Container[str] = NOBODY, *, way: Way = "sticky", key: str = "") -> str | None:
        """The replica for the next session, or None while none is ready. Changes nothing that replay would see.

        Args:
            avoid: replicas that get it only where all ready ones are in here.
            way: how it is chosen.
            key: what sessions of one prefix have in common, for `prefix_hash`.
        """
        if way == "sticky":
            return self._least_loaded(avoid)
        ready = [replica for replica in self.replicas.values() if replica.health == READY]
        ready = [replica for replica in ready if replica.id not in avoid] or ready
        if not ready:
            return None
        if way == "round_robin":
            return min(ready, key=lambda replica: (replica.chosen, replica.id)).id
        return max(ready, key=lambda replica: hashlib.blake2b(f"{key}\0{replica.id}".encode()).digest()).id

    def _least_loaded(self, avoid: Container[str]) -> str | None:
        passed = []
        while self.heap:
            _, _, replica_id, stamp = self.heap[0]
            replica = self.replicas.get(replica_id)
            if replica is not None and replica.stamp == stamp and replica.health == READY:
                if replica_id not in avoid:
                    break
                passed.append(self.heap[0])
            heapq.heappop(self.heap)
        for entry in passed:
            heapq.heappush(self.heap, entry)
        if len(passed) == len(self.heap):
            return passed[0][2] if passed else None
        return replica_id

    def open(self, rollout_id: str, attempt: int, replica_id: str) -> Session:
        """Record an assignment; an older session of the rollout ends."""
        self.release(rollout_id)
        session = Session(self.next_session, rollout_id, attempt, replica_id)
        self.next_session += 1
        self.picks += 1
        self.sessions[rollout_id] = session
        replica = self.replicas[replica_id]
        replica.in_flight += 1
        replica.sessions_total += 1
        replica.chosen = self.picks
        self._place(replica)
        return session

    def release(self, rollout_id: str) -> None:
        """End the rollout's session, if it has one."""
        session = self.sessions.pop(rollout_id, None)
        if session is None:
            return
        replica = self.replicas.get(session.replica)
        if replica is not None:
            replica.in_flight -= 1
            self._place(replica)
            if replica.health == DRAINING and replica.in_flight == 0:
                del self.replicas[replica.id]

    def usable(self, rollout_id: str, attempt: int) -> Session | None:
        """The open session of this very attempt, if its replica can still serve it."""
        session = self.sessions.get(rollout_id)
        if session is None or session.attempt != attempt:
            return None
        replica = self.replicas.get(session.replica)
        return session if replica is not None and replica.health != DOWN else None

    def change(
        self, replica_id: str, change: str, url: str, model: str, capacity: int, reason: str, version: int | None = None
    ) -> None:
        """Apply `join`, `ready`, `down`, `drain` or `leave`; `version` says which policy it was found to serve."""
        replica = self.replicas.get(replica_id)
        if change == "join":
            # Sessions outlive a re-registration: their count goes over to the new entry.
            in_flight = replica.in_flight if replica is not None else 0
            stamp = replica.stamp if replica is not None else 0
            replica = Replica(replica_id, url, model, capacity, in_flight=in_flight, stamp=stamp)
            self.replicas[replica_id] = replica
        elif replica is None:
            return
        elif change == "leave" or (change == "drain" and replica.in_flight == 0):
            for rollout_id in [r for r, s in self.sessions.items() if s.replica == replica_id]:
                del self.sessions[rollout_id]
            del self.replicas[replica_id]
            return
        else:
            replica.health = {"ready": READY, "down": DOWN, "drain": DRAINING}[change]
            replica.reason = reason
        if version is not None:
            replica.version = version
        self._place(replica)

    def intend(self, weights: Weights) -> None:
        """A swap begins; the router that finds it unfinished does it again."""
        self.swap = weights

    def swapped(self, weights: Weights, failed: dict[str, str]) -> None:
        """A version is current: who loaded it serves it, who did not is out until it has."""
        self.weights, self.swap = weights, None
        for replica in self.replicas.values():
            if replica.id not in failed:
                replica.version = weights.version
                continue
            replica.version = UNKNOWN if replica.version is None else replica.version
            replica.reason = failed[replica.id]
            if replica.health == READY:
                replica.health = DOWN
                self._place(replica)

    def behind(self, replica: Replica) -> bool:
        """Whether the replica must not serve before it has the current weights.

        One that joins is behind where the run loads the weights; where the trainer does, it is taken at its word.
        """
        if self.weights is None or (replica.version is None and self.weights.path is None):
            return False
        return replica.version != self.weights.version

    def to_move(self, above: float, pressed: Container[str]) -> list[str]:
        """Rollouts whose sessions should go elsewhere at their next turn: newest first, the rest keep their cache.

        A replica that has over `above` times its share (and two more than it) gives what is over the share; one in
        `pressed` gives an eighth of what it has, at least one. None where nobody could take them.
        """
        ready = [r for r in self.replicas.values() if r.health == READY and r.id not in pressed]
        if not ready:
            return []
        serving = [r for r in self.replicas.values() if r.health == READY]
        total, capacity = sum(r.in_flight for r in serving), sum(r.capacity for r in ready)
        over: dict[str, int] = {}
        for replica in serving:
            share = total * replica.capacity / capacity
            if replica.id in pressed and replica.in_flight > 0:
                over[replica.id] = max(1, replica.in_flight // 8)
            elif replica.in_flight > above * share and replica.in_flight >= share + 2:
                over[replica.id] = int(replica.in_flight - share)
        moving = []
        for rollout_id, session in reversed(self.sessions.items()):
            if over.get(session.replica, 0) > 0:
                over[session.replica] -= 1
                moving.append(rollout_id)
        return moving

    def _place(self, replica: Replica) -> None:
        replica.stamp += 1
        if replica.health == READY:
            entry = (replica.load, replica.chosen, replica.id, replica.stamp)
            heapq.heappush(self.heap, entry)
        if len(self.heap) > 64 and len(self.heap) > 4 * len(self.replicas):
            self.heap = [e for e in self.heap if e[2] in self.replicas and self.replicas[e[2]].stamp == e[3]]
            heapq.heapify(self.heap)
