"""POST /v1/policy: intent and outcome, refusals, replicas that fail and return, what a dead router left undone."""

from __future__ import annotations

import asyncio

import pytest

from stages.errors import ServiceError
from stages.ledger.events import PolicyChanged, PolicyIntended
from stages.ledger.machine import Ledger
from stages.wire import PolicyIn
from tests.support.fleets import ScriptedEngines, ToyFleet, refusing
from tests.support.waiting import eventually


def kinds(toy: ToyFleet) -> list[str]:
    """The journal's policy events, in order."""
    return [type(e).__name__ for e in toy.router.driven.events if isinstance(e, PolicyIntended | PolicyChanged)]


async def test_a_version_reaches_every_replica_between_its_intent_and_its_outcome() -> None:
    engines = ScriptedEngines()
    toy = ToyFleet(3, 1, engines)
    engines.free.clear()
    swapping = asyncio.create_task(toy.replicas.set_policy(PolicyIn(version=4, weights_path="/w/4", mode="wait")))
    await eventually(lambda: len(engines.under_way) == 3, "all swaps are under way")
    assert kinds(toy) == ["PolicyIntended"] and toy.router.ledger.state.policy_version == 0
    engines.free.set()
    answer = await swapping
    assert answer == {"version": 4, "replicas": [{"id": f"r{n}", "ok": True, "error": None} for n in range(3)]}
    assert kinds(toy) == ["PolicyIntended", "PolicyChanged"]
    assert sorted(engines.done) == [(f"http://r{n}", 4, "/w/4", "wait") for n in range(3)]
    again = Ledger()
    for event in toy.router.driven.events:
        again.apply(event)
    assert again.digest() == toy.router.ledger.digest()


@pytest.mark.parametrize("version", [3, 4])
async def test_a_version_not_above_the_current_is_409_and_changes_nothing(version: int) -> None:
    engines = ScriptedEngines()
    toy = ToyFleet(1, 1, engines)
    await toy.replicas.set_policy(PolicyIn(version=4))
    with pytest.raises(ServiceError) as caught:
        await toy.replicas.set_policy(PolicyIn(version=version, weights_path="/w"))
    assert (caught.value.status, caught.value.code) == (409, "not_newer") and len(engines.done) == 1


@pytest.mark.parametrize("path", ["/nowhere", "relative/path", "/nul\x00byte"])
async def test_an_unusable_path_is_400_before_any_engine_hears_of_it(path: str) -> None:
    engines = ScriptedEngines()
    toy = ToyFleet(1, 1, engines, check=refusing)
    with pytest.raises(ServiceError) as caught:
        await toy.replicas.set_policy(PolicyIn(version=1, weights_path=path))
    assert (caught.value.status, caught.value.detail["field"]) == (400, "weights_path")
    assert kinds(toy) == [] and engines.done == [] and toy.fleet.choose() == "r0"


async def test_a_replica_that_fails_is_out_until_it_has_the_version() -> None:
    engines = ScriptedEngines()
    toy = ToyFleet(2, 4, engines)
    where = dict(zip(toy.rollouts, await toy.open_all(), strict=True))
    engines.failing = {"http://r0"}
    answer = await toy.replicas.set_policy(PolicyIn(version=1, weights_path="/w"))
    assert [(r["id"], r["ok"]) for r in answer["replicas"]] == [("r0", False), ("r1", True)]
    assert "answered 500" in answer["replicas"][0]["error"]
    # It is healthy, and must not serve all the same.
    await toy.replicas._probe_all()
    await asyncio.gather(*toy.replicas._catching_up.values())
    assert toy.fleet.replicas["r0"].health == "down"
    assert set(await toy.open_all()) == {"r1"} and "r0" in where.values()
    engines.failing.clear()
    toy.replicas.policy._waits["r0"].until = 0.0  # type: ignore[union-attr]
    await toy.replicas._probe_all()
    await asyncio.gather(*toy.replicas._catching_up.values())
    assert toy.fleet.replicas["r0"].health == "ready" and toy.fleet.replicas["r0"].version == 1
    assert engines.done[-1] == ("http://r0", 1, "/w", "abort")


async def test_a_replica_that_was_down_does_not_come_back_with_old_weights() -> None:
    engines = ScriptedEngines()
    toy = ToyFleet(2, 1, engines)
    toy.dead.add("r0")
    for _ in range(2):
        await toy.replicas._probe_all()
    await toy.replicas.set_policy(PolicyIn(version=1))  # the trainer has loaded the engines that there are
    toy.dead.clear()
    await toy.replicas._probe_all()
    await asyncio.gather(*toy.replicas._catching_up.values())
    assert toy.fleet.replicas["r0"].health == "down" and "register" in toy.fleet.replicas["r0"].reason
    engines.versions["http://r0"] = "1"
    toy.replicas.policy._waits["r0"].until = 0.0  # type: ignore[union-attr]
    await toy.replicas._probe_all()
    await asyncio.gather(*toy.replicas._catching_up.values())
    assert toy.fleet.replicas["r0"].health == "ready" and engines.done == [("http://r1", 1, None, "keep")]


async def test_who_joins_later_loads_the_current_weights_first() -> None:
    from stages.wire import ReplicaIn

    engines = ScriptedEngines()
    toy = ToyFleet(1, 1, engines)
    await toy.replicas.set_policy(PolicyIn(version=2, weights_path="/w/2"))
    engines.free.clear()
    await toy.replicas.join(ReplicaIn(url="http://late:1", id="late"))
    assert toy.fleet.replicas["late"].health == "down"
    engines.free.set()
    await asyncio.gather(*toy.replicas._catching_up.values())
    assert toy.fleet.replicas["late"].health == "ready" and engines.done[-1][:3] == ("http://late:1", 2, "/w/2")


async def test_what_a_dead_router_intended_is_done_again() -> None:
    engines = ScriptedEngines()
    toy = ToyFleet(2, 1, engines)
    toy.router.driven.apply(PolicyIntended(t=1.0, version=7, weights_path="/w/7", mode="keep"))
    with pytest.raises(ServiceError) as caught:
        await toy.replicas.set_policy(PolicyIn(version=6, weights_path="/w/6"))
    assert caught.value.status == 409
    assert toy.replicas.policy is not None
    await toy.replicas.policy.finish_pending()
    assert toy.router.ledger.state.policy_version == 7 and toy.fleet.swap is None and len(engines.done) == 2
    await toy.replicas.policy.finish_pending()
    assert len(engines.done) == 2


async def test_a_newer_version_asked_for_while_one_is_pending_comes_after_it() -> None:
    engines = ScriptedEngines()
    toy = ToyFleet(1, 1, engines)
    engines.free.clear()
    first = asyncio.create_task(toy.replicas.set_policy(PolicyIn(version=1, weights_path="/w/1")))
    await eventually(lambda: engines.under_way != [], "the first is under way")
    first.cancel()
    second = asyncio.create_task(toy.replicas.set_policy(PolicyIn(version=2, weights_path="/w/2")))
    await asyncio.gather(first, return_exceptions=True)
    engines.free.set()
    assert (await second)["version"] == 2 and [version for _, version, _, _ in engines.done] == [1, 2]
    assert kinds(toy) == ["PolicyIntended", "PolicyChanged"] * 2


async def test_a_replica_left_paused_after_its_stamp_is_resumed_before_it_is_taken_back() -> None:
    engines = ScriptedEngines()
    toy = ToyFleet(1, 1, engines)
    engines.failing = {"http://r0"}
    await toy.replicas.set_policy(PolicyIn(version=1, weights_path="/w"))
    engines.versions["http://r0"], engines.paused = "1", {"http://r0"}
    for failing, health in (({"http://r0"}, "down"), (set(), "ready")):
        engines.failing = failing
        toy.replicas.policy._waits.clear()  # type: ignore[union-attr]
        await toy.replicas._probe_all()
        await asyncio.gather(*toy.replicas._catching_up.values())
        assert toy.fleet.replicas["r0"].health == health
    assert not engines.paused and engines.done == []


@pytest.mark.parametrize("path", ["/w", None])
async def test_a_ready_replica_that_stands_still_is_resumed_or_put_out(path: str | None) -> None:
    engines = ScriptedEngines()
    toy = ToyFleet(2, 1, engines)
    await toy.replicas.set_policy(PolicyIn(version=1, weights_path=path))
    engines.paused = {"http://r0", "http://r1"}
    engines.failing = {"http://r1"}
    await toy.replicas.look()
    health = [toy.fleet.replicas[name].health for name in ("r0", "r1")]
    if path is None:  # the trainer loads the weights, and pauses its engines itself
        assert engines.paused == {"http://r0", "http://r1"} and health == ["ready", "ready"]
    else:
        assert engines.paused == {"http://r1"} and health == ["ready", "down"]
        assert "may be paused" in toy.fleet.replicas["r1"].reason


async def test_a_router_that_leaves_amid_a_swap_ends_it_before_its_clients_close() -> None:
    engines = ScriptedEngines()
    toy = ToyFleet(1, 1, engines)
    engines.free.clear()
    asking = asyncio.create_task(toy.replicas.set_policy(PolicyIn(version=1, weights_path="/w")))
    await eventually(lambda: engines.under_way != [], "the swap is under way")
    assert toy.replicas.policy is not None
    await toy.replicas.policy.close(grace_s=0.0)
    assert engines.under_way == [] and toy.fleet.swap is not None, "the next router does it again"
    await asyncio.gather(asking, return_exceptions=True)
    with pytest.raises(ServiceError) as caught:
        await toy.replicas.set_policy(PolicyIn(version=2, weights_path="/w"))
    assert caught.value.status == 503


async def test_the_same_request_twice_at_once_is_one_swap_with_one_answer() -> None:
    engines = ScriptedEngines()
    toy = ToyFleet(1, 1, engines)
    request = PolicyIn(version=1, weights_path="/w")
    first, second = await asyncio.gather(toy.replicas.set_policy(request), toy.replicas.set_policy(request))
    assert first == second and len(engines.done) == 1


async def test_a_caller_that_goes_away_does_not_leave_the_fleet_half_swapped() -> None:
    engines = ScriptedEngines()
    toy = ToyFleet(2, 1, engines)
    engines.free.clear()
    asking = asyncio.create_task(toy.replicas.set_policy(PolicyIn(version=1, weights_path="/w")))
    await eventually(lambda: len(engines.under_way) == 2, "the swap is under way")
    asking.cancel()
    engines.free.set()
    await eventually(lambda: toy.router.ledger.state.policy_version == 1, "the swap has its outcome")


async def test_an_adapter_is_loaded_under_its_name_and_sessions_say_it(tmp_path) -> None:  # type: ignore[no-untyped-def]
    engines = ScriptedEngines()
    toy = ToyFleet(1, 2, engines)
    request = PolicyIn(version=1, weights_path=str(tmp_path), adapter="lora-a")
    with pytest.raises(ServiceError, match=r"adapter_config\.json"):
        await toy.replicas.set_policy(request)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    await toy.replicas.set_policy(request)
    assert engines.done == [("http://r0", 1, f"{tmp_path}/lora-a", "keep")]
    assert (await toy.open(toy.rollouts[0])).adapter == "lora-a"


async def test_who_samples_under_an_older_name_asks_for_its_session_again_at_its_next_turn(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    toy = ToyFleet(1, 2, ScriptedEngines())
    one, other = toy.rollouts
    replica = (await toy.open(one)).replica_id
    for version, adapter, renamed in ((1, "lora-a", [one]), (2, "lora-a", []), (3, "lora-b", [one]), (4, None, [one])):
        path = str(tmp_path)
        await toy.replicas.set_policy(PolicyIn(version=version, weights_path=path, adapter=adapter))
        assert toy.replicas.uneasy([one, other]) == (renamed, [])
        again = await toy.open(one)
        assert (again.adapter, again.replica_id) == (adapter, replica)
        assert toy.replicas.uneasy([one, other]) == ([], [])
