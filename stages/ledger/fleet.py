"""The fleet as the ledger sees it: replicas, sessions, and the sticky assignment of the one to the other.

A session goes to the ready replica with the fewest sessions in flight for its capacity; ties go to the one chosen
least recently, so idle replicas fill evenly and a newcomer gets its share without a stampede. The order is a heap whose
entries are stamped: a replica's entry counts only while its stamp is the replica's own.
"""

from __future__ import annotations

import heapq

import msgspec

READY, DOWN, DRAINING = "ready", "down", "draining"


class Replica(msgspec.Struct):
    """One engine: `capacity` is how many sessions it is meant to carry, `chosen` the pick that it last was."""

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


class Session(msgspec.Struct, frozen=True):
    """One attempt of a rollout on one replica."""

    id: int
    rollout_id: str
    attempt: int
    replica: str


class Fleet(msgspec.Struct):
    """Replicas by id, sessions by rollout id."""

    replicas: dict[str, Replica] = {}
    sessions: dict[str, Session] = {}
    picks: int = 0
    next_session: int = 1
    heap: list[tuple[float, int, str, int]] = []

    def choose(self) -> str | None:
        """The replica for the next session, or None while none is ready. Changes nothing that replay would see."""
        while self.heap:
            _, _, replica_id, stamp = self.heap[0]
            replica = self.replicas.get(replica_id)
            if replica is not None and replica.stamp == stamp and replica.health == READY:
                return replica_id
            heapq.heappop(self.heap)
        return None

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

    def change(self, replica_id: str, change: str, url: str, model: str, capacity: int, reason: str) -> None:
        """Apply `join`, `ready`, `down`, `drain` or `leave`."""
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
        self._place(replica)

    def _place(self, replica: Replica) -> None:
        replica.stamp += 1
        if replica.health == READY:
            entry = (replica.in_flight / replica.capacity, replica.chosen, replica.id, replica.stamp)
            heapq.heappush(self.heap, entry)
        if len(self.heap) > 64 and len(self.heap) > 4 * len(self.replicas):
            self.heap = [e for e in self.heap if e[2] in self.replicas and self.replicas[e[2]].stamp == e[3]]
            heapq.heapify(self.heap)
