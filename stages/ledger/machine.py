"""The ledger: a pure state machine, (state, event) -> (state, reply and effects). No clock, no I/O, no randomness.

Everything that an event implies is computed here and nowhere else, so a journal replayed through `apply` gives the very
state, index lines and sequence numbers of the run that wrote it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import msgspec

from stages.ledger import checkpoints, commits, endings, lag
from stages.ledger.book import Book
from stages.ledger.effects import Effect
from stages.ledger.events import (
    AnyEvent,
    CalledBack,
    Cancelled,
    Committed,
    Draining,
    EpochBegan,
    Heartbeat,
    Leased,
    MemberGone,
    PartBegan,
    PolicyChanged,
    PolicyIntended,
    ReplicaChanged,
    SessionClosed,
    SessionOpened,
    Submitted,
    Tick,
)
from stages.ledger.fleet import Weights
from stages.ledger.state import (
    EVAL,
    INIT,
    LEASED,
    RUN,
    EnvironmentState,
    Group,
    Lease,
    Rollout,
)


class Ledger(Book):
    """The book and its events; `apply` is the only way to change it."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[type, Callable[[Any], Any]] = {
            EpochBegan: self._epoch,
            PartBegan: lambda event: None,
            Submitted: self._submitted,
            Leased: self._leased,
            Heartbeat: self._heartbeat,
            Committed: lambda event: commits.commit(self, event),
            MemberGone: self._member_gone,
            CalledBack: self._called_back,
            Cancelled: self._cancelled,
            Tick: self._tick,
            Draining: lambda event: setattr(self.state, "draining", event.on),
            PolicyIntended: lambda event: self.state.fleet.intend(_weights(event)),
            PolicyChanged: self._policy,
            ReplicaChanged: self._replica,
            SessionOpened: self._session_opened,
            SessionClosed: self._session_closed,
        }

    def apply(self, event: AnyEvent) -> tuple[Any, list[Effect]]:
        """Take one event in; returns its reply (granted leases, commit statuses, ...) and the effects in order."""
        self.state.now = max(self.state.now, event.t)
        self.effects = []
        reply = self._handlers[type(event)](event)
        return reply, self.effects

    def digest(self) -> bytes:
        """The state as canonical bytes: two ledgers are equal when these are."""
        builtins = msgspec.to_builtins(self.state, str_keys=True)
        del builtins["fleet"]["heap"]
        return msgspec.json.encode(builtins, order="sorted")

    # -- events -------------------------------------------------------------------------------------------------------

    def _epoch(self, event: EpochBegan) -> None:
        state = self.state
        state.epoch, state.run_id, state.rules = event.epoch, event.run_id, event.rules
        # The new router has not heard from anyone yet: no lease may run out before one lease time has passed.
        for lease in state.leases.values():
            lease.expires_at = event.t + state.rules.lease_ttl_s
        state.last_progress = event.t

    def _submitted(self, event: Submitted) -> list[tuple[str, str, list[str]]]:
        state = self.state
        accepted = []
        for spec in event.groups:
            ids = [f"{spec.group_id}-{i}" for i in range(event.n)]
            group = Group(
                spec.group_id, spec.task_id, spec.payload, spec.environment, event.tag, event.priority, event.t,
                ids, event.n, sampling=event.sampling, min_usable=event.min_usable, max_lag=event.max_lag,
                callback_url=event.callback_url,
                deadline=None if event.deadline_s is None else event.t + event.deadline_s,
            )  # fmt: skip
            state.groups[group.id] = group
            state.next_group += 1
            self._admit(group)
            accepted.append((group.id, group.task_id, ids))
        state.counts.accepted += event.n * len(event.groups)
        state.counts.groups_accepted += len(event.groups)
        if event.key is not None:
            state.keys[event.key] = (event.body_digest or "", [spec.group_id for spec in event.groups])
        state.last_progress = state.now
        self.fill_ready_buffer()
        return accepted

    def _admit(self, group: Group) -> None:
        state = self.state
        environment = state.environments.get(group.environment)
        if environment is None:
            environment = EnvironmentState(group.environment, state.next_order, group.payload)
            state.environments[group.environment] = environment
        for rollout_id in group.rollouts:
            rollout = Rollout(rollout_id, group.id, state.next_order, state.now, state.now)
            state.next_order += 1
            state.rollouts[rollout_id] = rollout
            if environment.layer is not None:
                self.hold(rollout)
            else:
                environment.waiting[rollout_id] = None
        if environment.layer is None and not environment.lease:
            self.enqueue_environment(environment)

    def _leased(self, event: Leased) -> list[Lease]:
        state = self.state
        granted = []
        for work in event.work:
            attempt = self._lease_environment(work) if event.stage == INIT else self._lease_rollout(work, event.stage)
            lease = Lease(
                state.next_lease, event.member, event.stage, work, event.t, event.t + state.rules.lease_ttl_s, attempt
            )
            state.next_lease += 1
            state.leases[lease.id] = lease
            state.members.setdefault(event.member, {})[lease.id] = None
            if event.stage == INIT:
                state.environments[work].lease = lease.id
            else:
                state.rollouts[work].lease = lease.id
            granted.append(lease)
        if granted:
            self.fill_ready_buffer()
        return granted

    def _lease_environment(self, key: str) -> int:
        self.queues.by_stage[INIT].discard(key)
        environment = self.state.environments[key]
        for rollout_id in environment.waiting:
            rollout = self.state.rollouts[rollout_id]
            rollout.state = LEASED
            rollout.queue_init_s += self.state.now - rollout.queued_at
            rollout.queued_at = self.state.now
        return environment.tries + environment.losses + 1

    def _lease_rollout(self, rollout_id: str, stage: str) -> int:
        self.queues.by_stage[stage].discard(rollout_id)
        rollout = self.state.rollouts[rollout_id]
        rollout.state = LEASED
        waited = self.state.now - rollout.queued_at
        if stage == RUN:
            rollout.attempt += 1
            rollout.queue_run_s += waited
            checkpoints.waste_if_stale(self, rollout)
        else:
            rollout.queue_eval_s += waited
        return rollout.attempt

    def _heartbeat(self, event: Heartbeat) -> tuple[list[int], list[int]]:
        """Returns (renewed, unknown): the member's leases that go on, and those that are no longer its own."""
        renewed, unknown = [], []
        expires_at = event.t + self.state.rules.lease_ttl_s
        mine = self.state.members.setdefault(event.member, {})
        for lease_id in event.leases:
            if lease_id in mine:
                self.state.leases[lease_id].expires_at = expires_at
                renewed.append(lease_id)
            else:
                unknown.append(lease_id)
        return renewed, unknown

    def _member_gone(self, event: MemberGone) -> int:
        leases = list(self.state.members.pop(event.member, {}))
        for lease_id in leases:
            commits.lose(self, self.state.leases[lease_id], event.reason or "its worker ended")
        return len(leases)

    def _cancelled(self, event: Cancelled) -> int:
        ended = 0
        for group_id in event.groups:
            group = self.state.groups.get(group_id)
            if group is not None:
                ended += endings.cancel_open(self, group, "cancelled", event.reason)
        for rollout_id in event.rollouts:
            rollout = self.state.rollouts.get(rollout_id)
            if rollout is not None:
                endings.end(self, rollout, "cancelled", event.reason)
                ended += 1
        self.fill_ready_buffer()
        return ended

    def _called_back(self, event: CalledBack) -> None:
        for group_id in event.groups:
            self.state.callbacks.pop(group_id, None)

    def _tick(self, event: Tick) -> None:
        state = self.state
        for lease in list(state.leases.values()):
            lease.expires_at += event.gap_s
            if lease.expires_at <= state.now:
                ttl_s = state.rules.lease_ttl_s
                commits.lose(self, lease, f"lease expired: {lease.member} has not renewed it for {ttl_s:g} s")
        for group in list(state.groups.values()):
            if group.deadline is not None and group.deadline <= state.now:
                endings.cancel_open(self, group, "deadline", "the group's deadline passed")
        while state.delayed and state.delayed[0][0] <= state.now:
            _, _, stage, work = heapq.heappop(state.delayed)
            self.requeue(stage, work)
        self.fill_ready_buffer()

    def due(self, now: float) -> bool:
        """Whether a Tick at `now` would change anything: the router journals no others."""
        state = self.state
        return (
            bool(state.delayed and state.delayed[0][0] <= now)
            or any(lease.expires_at <= now for lease in state.leases.values())
            or any(group.deadline is not None and group.deadline <= now for group in state.groups.values())
        )

    def _policy(self, event: PolicyChanged) -> None:
        self.state.policy_version = event.version
        self.state.fleet.swapped(_weights(event), event.failed)
        lag.drop_all_stale(self)
        self.fill_ready_buffer()

    def _replica(self, event: ReplicaChanged) -> None:
        self.state.fleet.change(
            event.replica, event.change, event.url, event.model, event.capacity, event.reason, event.version
        )

    def _session_opened(self, event: SessionOpened) -> Any:
        return self.state.fleet.open(event.rollout_id, event.attempt, event.replica)

    def _session_closed(self, event: SessionClosed) -> None:
        for rollout_id, session in self.state.fleet.sessions.items():
            if session.id == event.session:
                self.state.fleet.release(rollout_id)
                return


def _weights(event: PolicyIntended | PolicyChanged) -> Weights:
    return Weights(event.version, event.weights_path, event.mode, event.adapter)


__all__ = ["EVAL", "INIT", "RUN", "Ledger"]
