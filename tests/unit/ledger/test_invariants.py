"""Random event orders against the oracle of invariants, and replay of each history to the same state."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stages.ledger import events
from stages.ledger.events import (
    Draining,
    EpochBegan,
    Heartbeat,
    PolicyChanged,
    ReplicaChanged,
    Rules,
    SessionOpened,
)
from stages.ledger.machine import Ledger
from stages.ledger.state import Lease
from stages.trajectory import CheckpointRange
from tests.support.ledgers import Driven, check_invariants

RULES = Rules(lease_ttl_s=10.0, max_attempts=2, ready_buffer=3, max_lag=2)
OUTCOMES = ("ok", "ok", "ok", "policy_timeout", "context_length", "agent", "sandbox", "llm", "verifier", "given_back")
members = st.sampled_from(["m1", "m2", "m3"])
stages = st.sampled_from(["init", "run", "eval"])


class Orders(RuleBasedStateMachine):
    """Anything may happen at any time, also what a careful worker would never send."""

    def __init__(self) -> None:
        super().__init__()
        self.driven = Driven(RULES)
        self.leases: list[Lease] = []
        self.epoch = 1
        self.version = 0

    @rule(
        n=st.integers(1, 3), environment=st.sampled_from("abc"), priority=st.integers(0, 3),
        deadline_s=st.none() | st.floats(1, 50), min_usable=st.none() | st.integers(1, 2),
        max_lag=st.none() | st.integers(0, 3),
    )  # fmt: skip
    def submit(
        self, n: int, environment: str, priority: int, deadline_s: float | None, min_usable: int | None,
        max_lag: int | None,
    ) -> None:  # fmt: skip
        least = None if min_usable is None or min_usable > n else min_usable
        self.driven.submit(
            n, environment, priority=priority, deadline_s=deadline_s, min_usable=least, max_lag=max_lag
        )  # fmt: skip

    @rule(member=members, stage=stages, free=st.integers(1, 4))
    def lease(self, member: str, stage: str, free: int) -> None:
        self.leases += self.driven.lease(stage, member, free)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES), version=st.none() | st.integers(0, 5))
    def commit(self, data: st.DataObject, outcome: str, version: int | None) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        if lease.stage == "init" and outcome in {"policy_timeout", "context_length", "agent"}:
            outcome = "sandbox"
        alive = lease.id in self.driven.ledger.state.leases
        before = self.driven.ledger.state.committed.copy()
        status = self.driven.commit(lease, outcome, min_policy_version=version)
        assert status == ("ok" if alive else "already" if lease.id in before else "superseded")

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def commit_by_another(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        assert self.driven.commit(lease, "ok", member="somebody-else") in {"already", "superseded"}

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), tokens=st.integers(1, 5), version=st.none() | st.integers(0, 5), over=st.booleans())
    def checkpoint(self, data: st.DataObject, tokens: int, version: int | None, over: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        alive = lease.id in self.driven.ledger.state.leases
        if over and lease.stage != "run":
            return
        place = CheckpointRange(f"handoff/{lease.member}-0.seg", tokens, 8, 1, tokens, tokens, version)
        status = self.driven.keep(lease, place, over=over)
        assert (status == "ok") == alive

    @rule(member=members, data=st.data())
    def heartbeat(self, member: str, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from([lease.id for lease in self.leases] or [0]), max_size=4))
        self.driven.apply(Heartbeat(t=self.driven.t, member=member, leases=ids))

    @rule(member=members)
    def gone(self, member: str) -> None:
        self.driven.gone(member)

    @rule(seconds=st.floats(0.1, 12.0), gap_s=st.sampled_from([0.0, 0.0, 20.0]))
    def time(self, seconds: float, gap_s: float) -> None:
        self.driven.pass_time(seconds + gap_s, gap_s)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        state = self.driven.ledger.state
        rollouts = data.draw(st.lists(st.sampled_from(sorted(state.rollouts) or ["none"]), max_size=2))
        groups = data.draw(st.lists(st.sampled_from(sorted(state.groups) or ["none"]), max_size=1))
        self.driven.cancel(rollouts=rollouts, groups=groups)

    @rule(on=st.booleans())
    def drain(self, on: bool) -> None:
        self.driven.apply(Draining(t=self.driven.t, on=on))

    @rule()
    def policy(self) -> None:
        self.version += 1
        self.driven.apply(PolicyChanged(t=self.driven.t, version=self.version))

    @rule(replica=st.sampled_from(["r1", "r2"]), change=st.sampled_from(["join", "ready", "down", "drain", "leave"]))
    def replica(self, replica: str, change: str) -> None:
        self.driven.apply(ReplicaChanged(t=self.driven.t, replica=replica, change=change, url="http://x", capacity=2))

    @precondition(lambda self: any(r.stage == "run" for r in self.driven.ledger.state.rollouts.values()))
    @rule(data=st.data())
    def session(self, data: st.DataObject) -> None:
        running = [r for r in self.driven.ledger.state.rollouts.values() if r.stage == "run" and r.state == "leased"]
        replica = self.driven.ledger.state.fleet.choose()
        if running and replica is not None:
            rollout = data.draw(st.sampled_from(running))
            self.driven.apply(
                SessionOpened(t=self.driven.t, rollout_id=rollout.id, attempt=rollout.attempt, replica=replica)
            )

    @rule()
    def restart(self) -> None:
        """The next epoch replays everything that was journaled."""
        replayed = Ledger()
        for event in self.driven.events:
            replayed.apply(events.decode(events.encode(event)))
        assert replayed.digest() == self.driven.ledger.digest()
        self.driven.ledger = replayed
        self.epoch += 1
        self.driven.apply(EpochBegan(t=self.driven.t, epoch=self.epoch, run_id="r", history=[], rules=RULES))

    @invariant()
    def all_holds(self) -> None:
        check_invariants(self.driven)

    def teardown(self) -> None:
        """Whatever happened, honest workers bring every accepted rollout to its one end."""
        self.driven.apply(Draining(t=self.driven.t, on=False))
        for _ in range(400):
            if not self.driven.ledger.state.rollouts:
                break
            self.driven.pass_time(40)
            for stage in ("init", "run", "eval"):
                self.driven.through(stage, min_policy_version=self.version)
        assert not self.driven.ledger.state.rollouts and not self.driven.ledger.state.groups
        check_invariants(self.driven)


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
