"""The ledger's rules, one by one."""

from __future__ import annotations

import pytest

from stages.ledger import events
from stages.ledger.events import Draining, EpochBegan, Heartbeat, PolicyChanged, Rules
from stages.ledger.machine import Ledger
from tests.support.ledgers import Driven, check_invariants


def test_a_rollout_goes_through_three_stages_and_ends_with_one_line_and_its_group_closes_after_the_last() -> None:
    driven = Driven()
    rollouts = driven.submit(n=2)
    assert driven.through("init") == ["ok"]
    assert driven.through("run") == ["ok", "ok"]
    assert driven.through("eval") == ["ok", "ok"]
    assert [line.rollout_id for line in driven.rows] == rollouts
    assert {line.status for line in driven.rows} == {"completed"}
    (closed,) = driven.group_lines
    assert (closed.seq, closed.closed_by, closed.usable, closed.rollout_ids) == (3, "complete", 2, rollouts)
    check_invariants(driven)


def test_init_runs_once_an_environment_whatever_the_group_size() -> None:
    driven = Driven()
    driven.submit(n=8)
    driven.submit(n=8)
    assert len(driven.lease("init")) == 1
    driven.submit(n=8)
    assert driven.lease("init") == []


def test_a_failed_environment_is_tried_again_and_then_fails_its_rollouts_alone() -> None:
    driven = Driven(Rules(max_attempts=2))
    bad = driven.submit(n=2, environment="bad")
    driven.submit(n=1, environment="good")
    for _ in range(2):
        for lease in driven.lease("init"):
            driven.commit(lease, "sandbox" if lease.work == "bad" else "ok", message="no such image")
        driven.pass_time(60)
    assert {(line.rollout_id, line.status, line.failure_class) for line in driven.rows} == {
        (rollout, "failed", "sandbox") for rollout in bad
    }
    assert driven.rows[0].shard is None and driven.rows[0].chains == 0
    assert driven.failed[0]["boundary"] == "init" and driven.failed[0]["message"] == "no such image"
    assert len(driven.lease("run")) == 1
    check_invariants(driven)


def test_the_ready_buffer_bounds_what_init_prepares_ahead_of_run() -> None:
    driven = Driven(Rules(ready_buffer=4))
    for number in range(10):
        driven.submit(n=3, environment=f"env-{number}")
    most = 0
    for _ in range(30):
        driven.through("init")
        most = max(most, len(driven.ledger.queues.by_stage["run"]))
        check_invariants(driven)
        for lease in driven.lease("run", free=1):
            driven.commit(lease)
    assert most == 4


@pytest.mark.parametrize("outcome", ["sandbox", "llm", "infrastructure"])
def test_an_infrastructure_fault_is_retried_within_its_budget_and_never_becomes_reward_zero(outcome: str) -> None:
    driven = Driven(Rules(max_attempts=3))
    driven.submit(n=1)
    driven.through("init")
    for _ in range(3):
        (lease,) = driven.lease("run")
        driven.commit(lease, outcome)
        driven.pass_time(60)
        check_invariants(driven)
    (line,) = driven.rows
    assert (line.status, line.failure_class, line.reward, line.mask_sample) == ("failed", outcome, None, True)
    assert driven.failed[0]["attempts"] == 3


def test_a_fault_that_would_come_again_is_not_tried_again() -> None:
    driven = Driven()
    driven.submit(n=1)
    driven.through("init")
    (lease,) = driven.lease("run")
    driven.commit(lease, "llm", final=True)
    assert driven.rows[0].failure_class == "llm"


@pytest.mark.parametrize("outcome", ["policy_timeout", "agent"])
def test_what_the_policy_did_is_trainable_with_reward_zero(outcome: str) -> None:
    driven = Driven()
    driven.submit(n=1)
    driven.through("init")
    driven.through("run", outcome)
    driven.through("eval", reward=1.0)
    (line,) = driven.rows
    assert (line.status, line.failure_class, line.reward, line.mask_sample) == ("completed", outcome, 0.0, False)


def test_eval_is_retried_without_running_the_agent_again() -> None:
    driven = Driven()
    driven.submit(n=1)
    driven.through("init")
    driven.through("run")
    driven.through("eval", "verifier")
    driven.pass_time(60)
    assert driven.lease("run") == []
    assert driven.through("eval") == ["ok"]
    assert driven.rows[0].status == "completed"


def test_a_lease_that_is_not_renewed_expires_and_its_late_result_is_superseded() -> None:
    driven = Driven(Rules(lease_ttl_s=30))
    driven.submit(n=1)
    driven.through("init")
    (late,) = driven.lease("run", member="slow")
    driven.pass_time(29)
    assert driven.lease("run") == []
    driven.pass_time(2)
    (again,) = driven.lease("run", member="fast")
    assert again.attempt == late.attempt + 1
    assert driven.commit(late) == "superseded"
    assert driven.commit(again) == "ok"
    assert driven.commit(again) == "already"
    check_invariants(driven)


def test_heartbeats_renew_the_leases_they_list_and_no_others() -> None:
    driven = Driven(Rules(lease_ttl_s=30))
    driven.submit(n=2)
    driven.through("init")
    kept, dropped = driven.lease("run")
    driven.t += 20
    assert driven.apply(Heartbeat(t=driven.t, member="m1", leases=[kept.id, 999])) == ([kept.id], [999])
    driven.pass_time(15)
    assert kept.id in driven.ledger.state.leases
    assert dropped.id not in driven.ledger.state.leases


def test_time_in_which_the_router_itself_stood_still_expires_nothing() -> None:
    driven = Driven(Rules(lease_ttl_s=30))
    driven.submit(n=1)
    driven.through("init")
    driven.lease("run")
    driven.pass_time(300, gap_s=300)
    assert len(driven.ledger.state.leases) == 1


def test_a_new_epoch_expires_no_lease_before_one_lease_time() -> None:
    driven = Driven(Rules(lease_ttl_s=30))
    driven.submit(n=1)
    driven.through("init")
    driven.lease("run")
    driven.t += 500
    driven.apply(EpochBegan(t=driven.t, epoch=2, run_id="r", history=[], rules=Rules(lease_ttl_s=30)))
    driven.pass_time(29)
    assert len(driven.ledger.state.leases) == 1
    driven.pass_time(2)
    assert not driven.ledger.state.leases


def test_a_dead_members_leases_are_free_at_once() -> None:
    driven = Driven()
    driven.submit(n=3)
    driven.through("init")
    driven.lease("run", member="dead")
    assert driven.gone("dead") == 3
    assert len(driven.lease("run", member="alive")) == 3
    check_invariants(driven)


def test_a_rollout_that_kills_every_worker_ends_as_failed() -> None:
    driven = Driven(Rules(max_attempts=1))
    driven.submit(n=1)
    driven.through("init")
    for _ in range(3):
        driven.lease("run", member="dead")
        driven.gone("dead")
    (line,) = driven.rows
    assert (line.status, line.failure_class) == ("failed", "infrastructure")


def test_a_lease_given_back_costs_no_attempt() -> None:
    driven = Driven(Rules(max_attempts=1))
    driven.submit(n=1)
    driven.through("init")
    for _ in range(20):
        (lease,) = driven.lease("run")
        driven.commit(lease, "given_back")
    driven.through("run")
    driven.through("eval")
    assert driven.rows[0].status == "completed"


def test_cancelling_ends_open_rollouts_closes_groups_and_refuses_late_results() -> None:
    driven = Driven()
    first, second = driven.submit(n=2)
    driven.through("init")
    leases = driven.lease("run")
    assert driven.cancel(rollouts=[first]) == 1
    assert driven.cancel(rollouts=[first]) == 0
    assert driven.commit(leases[0]) == "superseded"
    assert driven.cancel(groups=["g1"]) == 1
    assert [line.status for line in driven.rows] == ["cancelled", "cancelled"]
    assert driven.group_lines[0].closed_by == "cancelled" and driven.group_lines[0].rollout_ids == [first, second]
    check_invariants(driven)


def test_min_usable_closes_the_group_early_with_its_shape_kept() -> None:
    driven = Driven()
    driven.submit(n=4, min_usable=2)
    driven.through("init")
    for lease in driven.lease("run", free=2):
        driven.commit(lease)
    driven.through("eval")
    (closed,) = driven.group_lines
    assert (closed.closed_by, closed.usable, len(closed.rollout_ids)) == ("min_usable", 2, 4)
    assert [row.status for row in driven.rows].count("cancelled") == 2


def test_the_deadline_covers_retries_and_closes_the_group() -> None:
    driven = Driven(Rules(max_attempts=100))
    driven.submit(n=2, deadline_s=100)
    driven.through("init")
    for _ in range(4):
        driven.through("run", "llm")
        driven.pass_time(26)
    (closed,) = driven.group_lines
    assert closed.closed_by == "deadline" and closed.usable == 0
    assert driven.t - 1000 <= 105


def test_priorities_are_stable_inside_and_kept_over_retries() -> None:
    driven = Driven()
    low = driven.submit(n=2, priority=10)
    high = driven.submit(n=2, priority=90)
    driven.through("init")
    (lease,) = driven.lease("run", free=1)
    assert lease.work == high[0]
    driven.commit(lease, "given_back")
    assert [lease.work for lease in driven.lease("run")] == [*high, *low]


def test_warm_layers_are_preferred_behind_the_head_of_the_queue() -> None:
    driven = Driven()
    cold = driven.submit(n=3, environment="cold")
    warm = driven.submit(n=3, environment="warm")
    driven.through("init")
    got = [lease.work for lease in driven.lease("run", free=3, warm=frozenset({"sha256:warm"}))]
    assert got == [cold[0], warm[0], warm[1]]


def test_a_draining_run_hands_out_no_new_work_but_finishes_grading() -> None:
    driven = Driven()
    driven.submit(n=1)
    driven.through("init")
    driven.through("run")
    driven.submit(n=1)
    driven.apply(Draining(t=driven.t))
    assert driven.lease("run") == [] and driven.lease("init") == []
    assert driven.through("eval") == ["ok"]


def test_a_rollout_over_the_policy_lag_is_stale_and_masked() -> None:
    driven = Driven(Rules(max_lag=1))
    driven.submit(n=1)
    driven.through("init")
    leases = driven.lease("run")
    driven.apply(PolicyChanged(t=driven.t, version=5))
    driven.commit(leases[0], min_policy_version=3)
    (line,) = driven.rows
    assert (line.status, line.failure_class, line.mask_sample) == ("failed", "stale", True)


def test_segments_are_counted_until_nothing_needs_them() -> None:
    driven = Driven()
    driven.submit(n=2)
    driven.through("init")
    driven.through("run")
    assert driven.ledger.state.segments == {"handoff/run-1-x-0.seg": 2}
    driven.through("eval")
    assert not driven.ledger.state.segments


def test_every_event_survives_its_journal_line_and_replay_gives_the_same_state() -> None:
    driven = Driven()
    driven.submit(n=3, tag="t", deadline_s=1e6, key="k", body_digest="d")
    driven.through("init")
    driven.through("run", "llm")
    driven.pass_time(5)
    driven.through("run")
    driven.through("eval")
    replayed = Ledger()
    for event in driven.events:
        replayed.apply(events.decode(events.encode(event)))
    assert replayed.digest() == driven.ledger.digest()
