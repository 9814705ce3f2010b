"""Sessions over the fleet's calls: policies, moves, avoidance, idle time; and what workers are told of them."""

from __future__ import annotations

import time
from collections import Counter

from stages.ledger.events import ReplicaChanged
from stages.router.readings import Reading
from stages.wire import ReplicaIn
from tests.support.fleets import ToyFleet


async def test_round_robin_asks_for_another_replica_each_turn_and_sticky_never_does() -> None:
    toy = ToyFleet(2, 1, way="round_robin")
    (rollout,) = toy.rollouts
    turns = [await toy.open(rollout) for _ in range(4)]
    assert [turn.replica_id for turn in turns] == ["r0", "r1", "r0", "r1"] and turns[0].once
    sticky = ToyFleet(2, 1)
    assert len({(await sticky.open(sticky.rollouts[0])).replica_id for _ in range(4)}) == 1
    assert not (await sticky.open(sticky.rollouts[0])).once


async def test_prefix_hash_keeps_a_task_together_and_a_joiner_takes_only_its_own() -> None:
    toy = ToyFleet(4, 4, way="prefix_hash")
    assert len(set(await toy.open_all())) == 1
    choose = toy.fleet.choose
    before = {key: choose(way="prefix_hash", key=key) for key in map(str, range(400))}
    toy.join("r9")
    moved = {key for key, was in before.items() if choose(way="prefix_hash", key=key) != was}
    assert {choose(way="prefix_hash", key=key) for key in moved} == {"r9"} and 40 <= len(moved) <= 120


async def test_a_session_that_is_to_move_goes_at_its_next_turn_and_its_worker_is_told() -> None:
    toy = ToyFleet(1, 12, move_above=1.5)
    assert set(await toy.open_all()) == {"r0"}
    toy.join("r1")
    await toy.replicas.look()
    moved, lost = toy.replicas.uneasy(toy.rollouts)
    assert len(moved) == 6 and lost == []
    assert {(await toy.open(rollout)).replica_id for rollout in moved} == {"r1"}
    await toy.replicas.look()
    assert toy.replicas.uneasy(toy.rollouts) == ([], [])
    assert {r.in_flight for r in toy.fleet.replicas.values()} == {6}


async def test_without_the_gate_no_session_ever_moves() -> None:
    toy = ToyFleet(1, 12)
    await toy.open_all()
    toy.join("r1")
    await toy.replicas.look()
    assert toy.replicas.uneasy(toy.rollouts) == ([], [])


async def test_the_workers_of_a_dead_replica_are_told_not_to_wait_for_it() -> None:
    toy = ToyFleet(2, 4)
    where = dict(zip(toy.rollouts, await toy.open_all(), strict=True))
    toy.dead.add("r0")
    for _ in range(2):
        await toy.replicas._probe_all()
    on_dead = [rollout for rollout in toy.rollouts if where[rollout] == "r0"]
    assert toy.replicas.uneasy(toy.rollouts) == ([], on_dead)
    toy.dead.clear()
    await toy.replicas._probe_all()
    assert toy.fleet.replicas["r0"].health == "ready"


async def test_of_several_tasks_at_a_turn_only_so_many_go_to_a_replica_that_is_nearly_full() -> None:
    toy = ToyFleet(2, 40)
    first = await toy.open_all(toy.rollouts[:8])
    assert Counter(first) == {"r0": 4, "r1": 4}
    toy.readings = {"r0": Reading(running=4, kv_usage=0.8), "r1": Reading(running=4, kv_usage=0.05)}
    await toy.replicas.look()
    assert set(await toy.open_all(toy.rollouts[8:])) == {"r1"}


async def test_when_all_are_full_the_least_loaded_still_serves() -> None:
    toy = ToyFleet(2, 4)
    toy.readings = {name: Reading(running=1, kv_usage=1.0) for name in ("r0", "r1")}
    await toy.replicas.look()
    assert Counter(await toy.open_all()) == {"r0": 2, "r1": 2}


async def test_a_session_that_nobody_asks_for_is_closed_after_the_idle_time() -> None:
    toy = ToyFleet(1, 2)
    await toy.open_all()
    idle_s = toy.router.ledger.state.rules.session_idle_s
    assert (await toy.open(toy.rollouts[0])).ask_again_s < idle_s
    toy.replicas._asked[toy.rollouts[0]] = time.monotonic() - idle_s - 1
    toy.replicas._close_idle()
    assert set(toy.fleet.sessions) == {toy.rollouts[1]} and toy.fleet.replicas["r0"].in_flight == 1


async def test_a_draining_replica_keeps_its_sessions_and_goes_with_the_last() -> None:
    toy = ToyFleet(2, 4)
    where = await toy.open_all()
    await toy.replicas.leave("r0")
    assert await toy.open_all() == where
    for rollout in toy.rollouts:
        toy.fleet.release(rollout)
    assert set(toy.fleet.replicas) == {"r1"}


async def test_runs_room_follows_preemptions() -> None:
    toy = ToyFleet(1, 40)
    assert toy.replicas.run_room() > 1000
    for count in range(2):
        toy.readings = {"r0": Reading(running=20, kv_usage=0.95, preemptions=float(count))}
        await toy.replicas.look()
    assert toy.replicas.flow.limit == 30 and toy.replicas.run_room() == 0


def test_a_snapshot_keeps_what_is_being_loaded() -> None:
    from stages.ledger import image
    from stages.ledger.events import PolicyIntended

    toy = ToyFleet(1, 1)
    toy.router.driven.apply(PolicyIntended(t=1.0, version=3, weights_path="/w", mode="wait"))
    toy.router.driven.apply(ReplicaChanged(t=1.0, replica="r0", change="ready", version=2))
    ledger = image.decode(image.encode(toy.router.ledger))
    assert ledger.state.fleet.swap == toy.fleet.swap and ledger.state.fleet.replicas["r0"].version == 2
    assert ledger.digest() == toy.router.ledger.digest()


async def test_a_session_whose_lease_is_renewed_stays_open_however_long_its_generation_takes() -> None:
    toy = ToyFleet(1, 2)
    await toy.open_all()
    idle_s = toy.router.ledger.state.rules.session_idle_s
    for rollout in toy.rollouts:
        toy.replicas._asked[rollout] = time.monotonic() - idle_s - 1
    toy.replicas.uneasy(toy.rollouts[:1])
    toy.replicas._close_idle()
    assert list(toy.fleet.sessions) == toy.rollouts[:1]


async def test_run_is_held_until_a_replica_was_healthy_in_this_routers_own_life() -> None:
    toy = ToyFleet(2, 1, hold=True)
    assert {r.health for r in toy.fleet.replicas.values()} == {"ready"} and toy.replicas.run_room() == 0
    toy.dead = {"r0", "r1"}
    await toy.replicas._probe_all()
    assert toy.replicas.run_room() == 0
    woken = toy.router.woken
    toy.dead = {"r0"}
    await toy.replicas._probe_all()
    assert toy.replicas.run_room() > 0 and toy.router.woken > woken
    toy.dead = {"r0", "r1"}
    for _ in range(2):
        await toy.replicas._probe_all()
    assert toy.replicas.run_room() == 0
    await toy.replicas.join(ReplicaIn(url="http://r2", id="r2"))
    assert toy.replicas.run_room() > 0
    await toy.replicas.remove("r2", "its process ended")
    assert toy.replicas.run_room() == 0 and ToyFleet(0, 1).replicas.run_room() > 0
