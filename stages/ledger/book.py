"""The ledger's book: its state and queues, and the moves that events and endings share. Pure."""

from __future__ import annotations

import heapq

from stages.ledger.effects import Effect, Revoke
from stages.ledger.state import INIT, QUEUED, RUN, EnvironmentState, Group, Queues, Rollout, State


class Book:
    """One State with its queues, and the effects of the event being applied, in order."""

    def __init__(self) -> None:
        self.state = State()
        self.queues = Queues()
        self.effects: list[Effect] = []

    def enqueue(self, rollout: Rollout, stage: str) -> None:
        """Put a rollout into a stage's queue now."""
        rollout.stage, rollout.state, rollout.lease = stage, QUEUED, 0
        rollout.queued_at = self.state.now
        self.queues.by_stage[stage].push(rollout.id, self.state.groups[rollout.group].priority, rollout.order)

    def hold(self, rollout: Rollout) -> None:
        """Its environment is ready: wait for room in the ready buffer, which bounds what INIT prepares ahead of RUN."""
        rollout.held = True
        self.queues.held.push(rollout.id, self.state.groups[rollout.group].priority, rollout.order)

    def fill_ready_buffer(self) -> None:
        """Move held rollouts into RUN's queue as far as the ready buffer has room."""
        room = self.state.rules.ready_buffer - len(self.queues.by_stage[RUN])
        if room <= 0 or not len(self.queues.held):
            return
        for rollout_id in list(self.queues.held.first(room)):
            self.queues.held.discard(rollout_id)
            rollout = self.state.rollouts[rollout_id]
            rollout.held = False
            rollout.queue_init_s += self.state.now - rollout.queued_at
            self.enqueue(rollout, RUN)

    def enqueue_environment(self, environment: EnvironmentState) -> None:
        """Queue an INIT for the environment at the priority of its most urgent waiting rollout."""
        waiting = [self.state.rollouts[r] for r in environment.waiting]
        if not waiting:
            return
        priority = max(self.state.groups[r.group].priority for r in waiting)
        self.queues.by_stage[INIT].push(environment.key, priority, environment.order)

    def delay(self, stage: str, work: str, order: int, delay_s: float) -> None:
        """Queue work again after a back-off."""
        heapq.heappush(self.state.delayed, (self.state.now + delay_s, order, stage, work))

    def requeue(self, stage: str, work: str) -> None:
        """Queue delayed or lost work again, if it is still wanted."""
        if stage == INIT:
            environment = self.state.environments.get(work)
            if environment is not None and environment.layer is None and not environment.lease:
                self.enqueue_environment(environment)
        else:
            rollout = self.state.rollouts.get(work)
            if rollout is not None and rollout.state == QUEUED:
                self.enqueue(rollout, stage)

    def max_lag(self, group: Group) -> int | None:
        """How many policy versions the group may lag behind: its own bound, else the run's; None where none."""
        return self.state.rules.max_lag if group.max_lag is None else group.max_lag

    def drop_lease(self, lease_id: int, *, revoke: str | None = None) -> None:
        """Forget a lease; with `revoke` its holder is told why at its next heartbeat."""
        lease = self.state.leases.pop(lease_id, None)
        if lease is None:
            return
        self.state.members.get(lease.member, {}).pop(lease_id, None)
        if lease.stage == INIT:
            environment = self.state.environments.get(lease.work)
            if environment is not None:
                environment.lease = 0
        if revoke is not None:
            self.effects.append(Revoke(lease.member, lease_id, revoke))
