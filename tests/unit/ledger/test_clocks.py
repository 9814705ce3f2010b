"""Clocks that stand 30 s apart: the router's own counts, and none of its predecessors' or workers' may hurt."""

from __future__ import annotations

import time

import pytest

from stages.ledger.events import EpochBegan, Rules, Tick
from stages.router.clock import Clock
from tests.support.ledgers import Driven, check_invariants

APART_S = 30.0
TTL_S = 10.0


def test_a_router_whose_wall_clock_is_behind_goes_on_from_the_last_journaled_time() -> None:
    last = time.time() + APART_S
    clock = Clock(not_before=last)
    assert last - 0.001 <= clock() <= last + 1.0
    assert clock() <= clock()


@pytest.mark.parametrize("apart_s", [-APART_S, 0.0, APART_S])
def test_a_new_router_with_another_clock_expires_no_lease_before_a_lease_time(apart_s: float) -> None:
    driven = Driven(Rules(lease_ttl_s=TTL_S))
    driven.submit(n=2)
    assert driven.through("init") == ["ok"]
    leases = driven.lease("run")
    # The new router's clock begins at its wall clock, or at the last journaled time where that is later.
    driven.t = max(driven.t, driven.t + apart_s)
    driven.apply(EpochBegan(t=driven.t, epoch=2, run_id="r", history=[], rules=Rules(lease_ttl_s=TTL_S)))
    driven.t += TTL_S - 0.1
    driven.apply(Tick(t=driven.t))
    assert set(driven.ledger.state.leases) == {lease.id for lease in leases}
    assert [driven.commit(lease) for lease in leases] == ["ok", "ok"]
    check_invariants(driven)


def test_an_event_from_before_the_last_one_does_not_turn_the_ledger_back() -> None:
    driven = Driven(Rules(lease_ttl_s=TTL_S))
    driven.submit(n=1)
    now = driven.ledger.state.now
    driven.apply(Tick(t=now - APART_S))
    assert driven.ledger.state.now == now
    check_invariants(driven)
