"""Sticky assignment: balance, ties, joiners, exact keys, health."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.ledger.fleet import Fleet


def fleet_of(count: int, capacity: int = 64) -> Fleet:
    fleet = Fleet()
    for number in range(count):
        fleet.change(f"r{number}", "join", f"http://r{number}", "m", capacity, "")
    return fleet


def open_many(fleet: Fleet, count: int, prefix: str = "s") -> list[str]:
    assigned = []
    for number in range(count):
        replica = fleet.choose()
        assert replica is not None
        fleet.open(f"{prefix}{number}", 1, replica)
        assigned.append(replica)
    return assigned


def loads(fleet: Fleet) -> list[int]:
    return [replica.in_flight for replica in fleet.replicas.values()]


def test_a_thousand_sessions_on_eight_idle_replicas_differ_by_at_most_one() -> None:
    fleet = fleet_of(8)
    open_many(fleet, 1000)
    assert max(loads(fleet)) - min(loads(fleet)) <= 1


def test_sessions_that_come_and_go_one_by_one_still_visit_all_replicas() -> None:
    fleet = fleet_of(8)
    seen = []
    for number in range(80):
        seen += open_many(fleet, 1, f"n{number}-")
        fleet.release(f"n{number}-0")
    assert {seen.count(f"r{i}") for i in range(8)} == {10}


def test_a_joiner_gets_its_share_of_new_sessions_and_no_live_one_moves() -> None:
    fleet = fleet_of(8, capacity=1000)
    open_many(fleet, 200, "old")
    before = dict(fleet.sessions)
    fleet.change("r8", "join", "http://r8", "m", 1000, "")
    new = open_many(fleet, 200, "new")
    assert new.count("r8") == 44
    assert all(fleet.sessions[rollout] == session for rollout, session in before.items())


def test_capacity_weighs_the_share() -> None:
    fleet = Fleet()
    fleet.change("big", "join", "http://b", "m", 30, "")
    fleet.change("small", "join", "http://s", "m", 10, "")
    assigned = open_many(fleet, 40)
    assert assigned.count("big") == 30


def test_keys_are_exact() -> None:
    fleet = fleet_of(2)
    fleet.open("session-1", 1, "r0")
    fleet.open("session-12", 1, "r1")
    fleet.release("session-1")
    assert list(fleet.sessions) == ["session-12"]
    assert fleet.usable("session-12", 2) is None
    assert fleet.usable("session-12", 1) is not None


def test_down_and_draining_replicas_take_nothing_new_and_come_back() -> None:
    fleet = fleet_of(2)
    open_many(fleet, 4)
    fleet.change("r0", "down", "", "", 0, "no answer")
    assert set(open_many(fleet, 3, "x")) == {"r1"}
    assert all(fleet.usable(rollout, 1) is None for rollout, s in fleet.sessions.items() if s.replica == "r0")
    fleet.change("r0", "ready", "", "", 0, "")
    assert "r0" in open_many(fleet, 3, "y")
    fleet.change("r1", "drain", "", "", 0, "")
    assert set(open_many(fleet, 3, "z")) == {"r0"}
    for rollout in list(fleet.sessions):
        fleet.release(rollout)
    assert list(fleet.replicas) == ["r0"]


@given(st.lists(st.tuples(st.sampled_from(["open", "close", "down", "ready"]), st.integers(0, 9)), max_size=200))
def test_the_heap_always_gives_a_least_loaded_ready_replica(steps: list[tuple[str, int]]) -> None:
    fleet = fleet_of(4, capacity=10)
    for kind, number in steps:
        if kind == "open" and (replica := fleet.choose()) is not None:
            fleet.open(f"s{number}", 1, replica)
        elif kind == "close":
            fleet.release(f"s{number}")
        elif kind in {"down", "ready"}:
            fleet.change(f"r{number % 4}", kind, "", "", 0, "")
        ready = [r for r in fleet.replicas.values() if r.health == "ready"]
        chosen = fleet.choose()
        if ready:
            least = min(ready, key=lambda r: (r.in_flight, r.chosen))
            assert chosen is not None
            best = fleet.replicas[chosen]
            assert (best.in_flight, best.chosen) == (least.in_flight, least.chosen)
        else:
            assert chosen is None
