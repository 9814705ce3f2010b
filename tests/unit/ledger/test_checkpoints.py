"""Which checkpoint of a rollout is kept, when it is dropped, and what of it counts as wasted."""

from __future__ import annotations

import pytest

from stages.ledger.effects import Finished
from stages.ledger.events import PolicyChanged, Rules
from stages.ledger.state import Lease
from stages.trajectory import CheckpointRange
from tests.support.ledgers import Driven


def place(tokens: int, path: str = "handoff/run-1-a-0.seg", version: int = 0) -> CheckpointRange:
    return CheckpointRange(path, 8 * tokens, 8, 1, turns=tokens // 10, tokens=tokens, min_policy_version=version)


def in_run(rules: Rules | None = None, **options: object) -> tuple[Driven, Lease, str]:
    driven = Driven(rules or Rules(max_attempts=3))
    (rollout_id,) = driven.submit(1, **options)
    driven.through("init")
    (lease,) = driven.lease("run")
    return driven, lease, rollout_id


def test_the_newest_is_kept_and_one_that_comes_twice_or_late_changes_nothing() -> None:
    driven, lease, rollout_id = in_run()
    rollout = driven.ledger.state.rollouts[rollout_id]
    for given, kept in ((10, 10), (30, 30), (20, 30), (30, 30)):
        assert driven.keep(lease, place(given)) == "ok"
        assert rollout.checkpoint == place(kept)
    assert driven.ledger.state.segments == {"handoff/run-1-a-0.seg": 1}
    assert driven.ledger.state.leases.keys() == {lease.id}


def test_an_older_segment_is_free_when_a_newer_one_has_the_checkpoint() -> None:
    driven, lease, _ = in_run()
    driven.keep(lease, place(10))
    driven.keep(lease, place(20, "handoff/run-1-a-1.seg"))
    assert Finished("handoff/run-1-a-0.seg") in driven.ledger.effects
    assert driven.ledger.state.segments == {"handoff/run-1-a-1.seg": 1}


def test_a_later_attempt_that_began_anew_replaces_what_holds_more() -> None:
    driven, lease, rollout_id = in_run()
    driven.keep(lease, place(30), over=True)
    (again,) = driven.lease("run", "m2")
    driven.keep(again, place(10, "handoff/run-2-b-0.seg"))
    assert driven.ledger.state.rollouts[rollout_id].checkpoint == place(10, "handoff/run-2-b-0.seg")
    assert driven.keep(lease, place(40)) == "already"


@pytest.mark.parametrize(
    ("outcome", "kept", "wasted"),
    [
        ("llm", True, 0),
        ("sandbox", False, 30),
        ("infrastructure", False, 30),
        ("ok", False, 0),
        ("given_back", True, 0),
    ],
)
def test_what_the_end_of_an_attempt_does_to_it(outcome: str, kept: bool, wasted: int) -> None:
    driven, lease, rollout_id = in_run()
    driven.keep(lease, place(30))
    driven.commit(lease, outcome)
    assert (driven.ledger.state.rollouts[rollout_id].checkpoint is not None) == kept
    assert driven.ledger.state.counts.wasted_tokens == wasted


def test_a_lost_worker_costs_no_checkpoint_and_an_ended_rollout_keeps_none() -> None:
    driven, lease, rollout_id = in_run()
    driven.keep(lease, place(30))
    driven.gone(lease.member)
    assert driven.ledger.state.rollouts[rollout_id].checkpoint == place(30)
    driven.cancel(rollouts=[rollout_id])
    assert not driven.ledger.state.segments


def test_tokens_over_the_lag_bound_are_not_gone_on_from() -> None:
    driven, lease, rollout_id = in_run(max_lag=1)
    driven.keep(lease, place(30, version=3), over=True)
    driven.apply(PolicyChanged(t=driven.t, version=4))
    (again,) = driven.lease("run")
    assert driven.ledger.state.rollouts[rollout_id].checkpoint is not None
    driven.commit(again, "given_back")
    driven.apply(PolicyChanged(t=driven.t, version=5))
    driven.lease("run")
    assert driven.ledger.state.rollouts[rollout_id].checkpoint is None
    assert driven.ledger.state.counts.wasted_tokens == 30
