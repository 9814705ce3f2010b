"""Public bugs of the field that the state machine decides: one test each, named by its number."""

from __future__ import annotations

import pytest

from stages.ledger.events import PolicyChanged, Rules
from stages.ledger.state import RUN
from stages.router.views import status_view
from tests.support.ledgers import ROW, Driven, check_invariants


def prepared_but_unstarted(driven: Driven) -> int:
    """Rollouts whose environment is ready and whose agent has never begun, of environments of their own."""
    return sum(
        rollout.held or (rollout.stage == RUN and rollout.attempt == 0)
        for rollout in driven.ledger.state.rollouts.values()
    )


@pytest.mark.parametrize(("init_free", "run_free"), [(1, 1), (8, 1), (100, 3)])
def test_b02_init_never_runs_further_ahead_than_the_ready_buffer(init_free: int, run_free: int) -> None:
    driven, most = Driven(Rules(ready_buffer=5)), 0
    for number in range(60):
        driven.submit(n=1, environment=f"env-{number}")
    for step in range(200):
        leases = driven.lease("init", free=init_free)
        for lease in leases:
            driven.commit(lease)
            most = max(most, prepared_but_unstarted(driven))
        if step % 10 == 9:  # RUN is ten times slower
            for lease in driven.lease("run", free=run_free):
                driven.commit(lease)
        check_invariants(driven)
    assert most == 5


def test_b02_one_environment_of_many_rollouts_fills_the_run_queue_up_to_the_buffer_alone() -> None:
    driven = Driven(Rules(ready_buffer=5))
    driven.submit(n=40)
    driven.through("init")
    for _ in range(40):
        assert len(driven.ledger.queues.by_stage[RUN]) <= 5
        for lease in driven.lease("run", free=1):
            driven.commit(lease)
    assert not driven.lease("run")


def test_b03_a_lease_given_back_by_a_drained_worker_costs_no_attempt_and_is_no_failure() -> None:
    driven = Driven(Rules(max_attempts=1))
    driven.submit(n=3)
    driven.through("init")
    driven.through("run", "given_back")
    check_invariants(driven)
    assert driven.rows == [] and driven.ledger.state.counts.infra_failures == 0
    again = driven.lease("run", member="after the requeue")
    assert sorted(lease.work for lease in again) == sorted(driven.ledger.state.rollouts)
    for lease in again:
        driven.commit(lease)
    driven.through("eval", "given_back")
    driven.through("eval")
    assert [row.status for row in driven.rows] == ["completed"] * 3 and driven.failed == []


@pytest.mark.parametrize(
    ("outcome", "final", "status"),
    [("context_length", False, "completed"), ("policy_timeout", False, "completed"), ("llm", True, "failed")],
)
def test_b04_what_would_only_come_again_is_terminal_after_one_attempt(outcome: str, final: bool, status: str) -> None:
    driven = Driven(Rules(max_attempts=5))
    driven.submit(n=1)
    driven.through("init")
    (lease,) = driven.lease("run")
    driven.commit(lease, outcome, final=final)
    driven.pass_time(60)
    assert driven.lease("run") == []
    driven.through("eval")
    (line,) = driven.rows
    assert (line.status, line.failure_class, lease.attempt) == (status, outcome, 1)
    assert driven.ledger.state.counts.retries == 0


def test_b06_a_late_result_of_a_superseded_attempt_is_refused_without_a_second_row() -> None:
    driven = Driven(Rules(lease_ttl_s=30))
    driven.submit(n=1)
    driven.through("init")
    (late,) = driven.lease("run", member="slow")
    driven.pass_time(31)
    (again,) = driven.lease("run", member="fast")
    assert driven.commit(again, member="slow") == "superseded"
    assert driven.commit(late) == "superseded"
    assert driven.commit(again) == "ok"
    assert driven.commit(late) == "superseded"
    driven.through("eval")
    assert driven.commit(late) == "superseded" and driven.commit(again) == "already"
    assert len(driven.rows) == 1
    check_invariants(driven)


def bounded(n: int = 4, max_lag: int | None = 1, **options: object) -> Driven:
    """A group of n under a bound, its agents all running at policy version 5."""
    driven = Driven(Rules(max_lag=max_lag))
    driven.apply(PolicyChanged(t=driven.t, version=5))
    driven.submit(n=n, **options)
    driven.through("init")
    return driven


def test_b13_one_rollout_over_the_bound_takes_its_whole_group_along() -> None:
    driven = bounded()
    first, second, third, fourth = driven.lease("run")
    driven.commit(first, min_policy_version=5)
    driven.through("eval", min_policy_version=5)
    assert driven.rows == [], "a row of a bounded group is out before its group is decided"
    driven.commit(second, min_policy_version=4)
    check_invariants(driven)
    driven.commit(third, min_policy_version=3)
    assert {(row.status, row.failure_class, row.reward, row.mask_sample, row.shard) for row in driven.rows} == {
        ("failed", "stale", None, True, None)
    }
    assert len(driven.rows) == 4
    (closed,) = driven.group_lines
    assert (closed.usable, len(closed.rollout_ids)) == (0, 4)
    assert driven.commit(fourth, min_policy_version=5) == "superseded"
    check_invariants(driven)


def test_b13_a_newer_policy_drops_what_is_graded_already() -> None:
    driven = bounded(max_lag=None, n=2)
    unbounded = driven.lease("run")
    driven.submit(n=2, max_lag=1)
    driven.through("init")
    first, _ = driven.lease("run")
    driven.commit(first, min_policy_version=5)
    for lease in unbounded:
        driven.commit(lease, min_policy_version=5)
    driven.through("eval", min_policy_version=5)
    assert [row.status for row in driven.rows] == ["completed"] * 2, "a group without a bound waits for nothing"
    driven.apply(PolicyChanged(t=driven.t, version=6))
    assert len(driven.rows) == 2
    driven.apply(PolicyChanged(t=driven.t, version=7))
    assert [row.failure_class for row in driven.rows[2:]] == ["stale", "stale"]
    assert driven.group_lines[-1].usable == 0
    check_invariants(driven)


def test_b13_a_group_within_the_bound_comes_out_whole_and_in_order() -> None:
    driven = bounded(n=3)
    leases = driven.lease("run")
    driven.apply(PolicyChanged(t=driven.t, version=6))
    for lease in leases:
        driven.commit(lease, min_policy_version=5)
    first, second, third = driven.lease("eval")
    driven.commit(second, min_policy_version=5)
    driven.commit(third, "verifier", final=True)
    assert driven.rows[0].failure_class == "verifier" and len(driven.rows) == 1
    driven.commit(first, min_policy_version=5)
    assert [row.rollout_id for row in driven.rows[1:]] == [first.work, second.work]
    assert [row.shard for row in driven.rows[1:]] == [ROW.path] * 2
    assert driven.group_lines[0].usable == 2
    check_invariants(driven)


@pytest.mark.parametrize(
    ("options", "closed_by"), [({"min_usable": 2}, "min_usable"), ({"deadline_s": 50.0}, "deadline")]
)
def test_b13_a_bounded_group_that_closes_early_keeps_what_was_graded(
    options: dict[str, object], closed_by: str
) -> None:
    driven = bounded(**options)
    leases = driven.lease("run")
    for lease in leases[:2]:
        driven.commit(lease, min_policy_version=5)
    driven.through("eval", min_policy_version=5)
    driven.pass_time(51)
    assert sorted(row.status for row in driven.rows) == ["cancelled", "cancelled", "completed", "completed"]
    assert (driven.group_lines[0].closed_by, driven.group_lines[0].usable) == (closed_by, 2)
    check_invariants(driven)


def test_b32_the_hard_deadline_covers_retries_and_their_back_offs() -> None:
    driven = Driven(Rules(max_attempts=1000))
    driven.submit(n=2, deadline_s=100)
    driven.through("init")
    attempts = 0
    while not driven.group_lines:
        attempts += len(driven.through("run", "llm"))
        driven.pass_time(5)
        assert driven.t <= 1000 + 100 + 5, "retries went on past the deadline"
    assert attempts >= 10
    assert driven.group_lines[0].closed_by == "deadline"
    assert [(row.status, row.failure_class) for row in driven.rows] == [("cancelled", "cancelled")] * 2
    check_invariants(driven)


def test_b33_sandbox_deaths_are_masked_and_in_the_failure_ratio_and_never_reward_zero() -> None:
    driven = Driven(Rules(max_attempts=2))
    dead, alive = driven.submit(n=2)
    driven.through("init")
    for _ in range(2):
        for lease in driven.lease("run"):
            driven.commit(lease, "sandbox" if lease.work == dead else "ok")
        driven.pass_time(60)
    driven.through("eval")
    by_id = {row.rollout_id: row for row in driven.rows}
    assert (by_id[dead].status, by_id[dead].mask_sample, by_id[dead].reward) == ("failed", True, None)
    assert (by_id[dead].failure_class, by_id[alive].reward) == ("sandbox", 1.0)
    view = status_view(driven.ledger)
    # Two deaths among four ended attempts: two of RUN died, one of RUN and one of EVAL went well.
    assert view["infra_failure_ratio"] == 0.5
    assert view["failures"] == {"sandbox": 1}


def test_b38_group_statistics_leave_masked_rollouts_out() -> None:
    driven = Driven(Rules(max_attempts=1))
    driven.submit(n=4)
    driven.through("init")
    outcomes = ["infrastructure", "sandbox", "ok", "ok"]
    for lease, outcome in zip(driven.lease("run"), outcomes, strict=True):
        driven.commit(lease, outcome)
    driven.through("eval", reward=1.0)
    (closed,) = driven.group_lines
    assert (closed.usable, len(closed.rollout_ids), closed.closed_by) == (2, 4, "complete")
    assert status_view(driven.ledger)["reward"] == {"mean": 1.0, "n": 2}
    assert [row.reward for row in driven.rows if row.mask_sample] == [None, None]


def test_b38_masked_rollouts_do_not_count_towards_min_usable() -> None:
    driven = Driven(Rules(max_attempts=1))
    driven.submit(n=4, min_usable=2)
    driven.through("init")
    first, second, third, fourth = driven.lease("run")
    for lease in (first, second):
        driven.commit(lease, "sandbox")
    assert driven.group_lines == []
    for lease in (third, fourth):
        driven.commit(lease)
    driven.through("eval")
    assert (driven.group_lines[0].closed_by, driven.group_lines[0].usable) == ("complete", 2)


def test_b40_a_straggler_does_not_hold_its_group_beyond_the_deadline_and_the_shape_is_kept() -> None:
    driven = Driven()
    rollouts = driven.submit(n=4, deadline_s=60)
    driven.through("init")
    *quick, straggler = driven.lease("run")
    for lease in quick:
        driven.commit(lease)
    driven.through("eval")
    driven.pass_time(59)
    assert driven.group_lines == []
    driven.pass_time(1)
    (closed,) = driven.group_lines
    assert (closed.closed_by, closed.usable, closed.rollout_ids) == ("deadline", 3, rollouts)
    assert {row.rollout_id: row.status for row in driven.rows}[straggler.work] == "cancelled"
    assert sorted(row.rollout_id for row in driven.rows) == sorted(rollouts)
    assert driven.commit(straggler) == "superseded"
    check_invariants(driven)
