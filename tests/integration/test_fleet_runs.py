"""The fleet over real HTTP: a replica that dies in mid-run and comes back, a thousand sessions at once, a real swap."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stages.chat import ChatTokenizer
from stages.client import AsyncRolloutClient
from stages.engine_client import EngineClient
from stages.engine_control import EngineControl
from stages.errors import ServiceError
from stages.http import RouterLink
from stages.layout import RunLayout
from stages.ledger.events import Rules
from stages.model import StreamModel
from stages.pools.sessions import AttemptSession
from stages.router.replicas import FleetRules
from stages.trajectory import Message, Sampling
from tests.support.mock_engine import POLICY, MockEngine, Script
from tests.support.routers import HandWorker, make_run, routed
from tests.support.waiting import eventually
from workflows.tools.bash import SCHEMA

TURNS = 4


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "run")


@pytest.fixture(scope="module")
def script() -> Script:
    return Script(calls=TURNS - 1)


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer.load(POLICY)


async def leases_of(trainer: AsyncRolloutClient, worker: HandWorker, rollouts: int) -> list[dict[str, Any]]:
    """So many rollouts in RUN."""
    await trainer.submit([{"task_id": f"toy-{n}"} for n in range(rollouts // 16)], group_size=16)
    await worker.through("init")
    leases: list[dict[str, Any]] = []
    while len(leases) < rollouts:
        leases += await worker.lease("run", free=rollouts)
    return leases


class Rollout:
    """One attempt's model, on a session with the fleet."""

    def __init__(self, link: RouterLink, engine: EngineClient, chat: ChatTokenizer, lease: dict[str, Any]) -> None:
        self.session = AttemptSession(link, engine, lease["rollout_id"], lease["attempt"])
        self.model = StreamModel(
            self.session, self.session.open, chat, Sampling(max_tokens=64), name=lease["rollout_id"], patience_s=30
        )

    async def play(self) -> list[str]:
        """All turns; the replicas that sampled them."""
        messages = [Message("system", "You add."), Message("user", "12 + 30 = ?")]
        for _ in range(TURNS):
            reply = await self.model.generate(messages=messages, tools=[SCHEMA])
            messages += [reply, Message("tool", "42")]
        (chain,) = self.model.trajectory().chains
        return [turn.replica for turn in chain.turns]


async def test_b07_a_replica_killed_in_mid_run_fails_no_rollout_and_is_used_again_within_seconds(
    layout: RunLayout, script: Script, chat: ChatTokenizer
) -> None:
    async with (
        routed(layout, rules=Rules(lease_ttl_s=60.0)) as link,
        AsyncRolloutClient(layout.root) as trainer,
        EngineClient() as client,
        MockEngine(script) as first,
        MockEngine(script) as second,
    ):
        for engine in (first, second):
            await trainer.add_replica(engine.url)
        worker = HandWorker(link, "w-1-a")
        leases = await leases_of(trainer, worker, 64)
        first.hold(30)
        playing = [asyncio.create_task(Rollout(link, client, chat, lease).play()) for lease in leases[:48]]
        await eventually(lambda: first.held == 24, "24 rollouts are in their second or third turn there")
        first.stop()
        turns = await asyncio.gather(*playing)
        assert all(len(replicas) == TURNS for replicas in turns)
        assert len({replicas[-1] for replicas in turns}) == 1, "all of them ended on the one that lives"
        # Six answers more than rollouts there: as many may not have had their first turn yet.
        assert 18 <= sum(len(set(replicas)) == 2 for replicas in turns) <= 24
        status = await trainer.status()
        assert Counter(r["state"] for r in status["fleet"]) == {"ready": 1, "down": 1}
        assert "probes of" in next(r["reason"] for r in status["fleet"] if r["state"] == "down")
        first.let_go()
        await first.start(first.port)
        before = first.asked["/inference/v1/generate"]

        async def back() -> bool:
            return Counter(r["state"] for r in (await trainer.status())["fleet"]) == {"ready": 2}

        await eventually(back, "the replica that came back is ready")
        for lease in leases[48:]:  # some have a session with the other one
            await Rollout(link, client, chat, lease).play()
        assert first.asked["/inference/v1/generate"] > before, "the replica that came back is used"


async def test_a_thousand_generations_at_once_end_without_an_error_and_leave_no_descriptor(
    layout: RunLayout, script: Script
) -> None:
    count = 1024
    async with (
        routed(layout, rules=Rules(lease_ttl_s=60.0, ready_buffer=2 * count), max_open=2 * count) as link,
        AsyncRolloutClient(layout.root) as trainer,
        MockEngine(script) as first,
        MockEngine(script) as second,
    ):
        for engine in (first, second):
            await trainer.add_replica(engine.url, capacity=count)
            engine.hold()
        leases = await leases_of(trainer, HandWorker(link, "w-1-a"), count)
        await trainer.status()
        before = len(os.listdir("/proc/self/fd"))
        async with EngineClient() as client:

            async def one(lease: dict[str, Any]) -> str:
                session = AttemptSession(link, client, lease["rollout_id"], lease["attempt"])
                given = await session.open(None)
                await session.generate(given.replica_url, [1, 2, 3], Sampling(), name="x", timeout_s=120)
                return given.replica_id

            asking = [asyncio.create_task(one(lease)) for lease in leases]
            await eventually(lambda: first.held + second.held == count, "all of them are under way", 60.0)
            for engine in (first, second):
                engine.let_go()
            given = await asyncio.gather(*asking)
        assert set(Counter(given).values()) == {count // 2}
        # Connections to the router and of its own probes come and go; the thousand must be gone.
        await eventually(lambda: len(os.listdir("/proc/self/fd")) < before + 300, "descriptors are flat")


async def test_a_swap_over_http_reaches_healthy_replicas_and_puts_the_broken_one_out(
    layout: RunLayout, tmp_path: Path
) -> None:
    async with (
        routed(layout) as link,
        AsyncRolloutClient(layout.root) as trainer,
        MockEngine() as good,
        MockEngine() as bad,
    ):
        for engine in (good, bad):
            await trainer.add_replica(engine.url)
        with pytest.raises(ServiceError) as caught:
            await trainer.policy(1, weights_path=str(tmp_path))
        assert (caught.value.status, caught.value.code) == (400, "unusable_path") and not good.calls
        bad.broken.add("/collective_rpc")
        answer = await trainer.policy(1, weights_path=str(POLICY), mode="abort")
        assert answer["version"] == 1 and sorted(r["ok"] for r in answer["replicas"]) == [False, True]
        assert good.calls == ["mode=abort", "load", "reset", "stamp 1", "resume"] and good.weights == str(POLICY)
        assert bad.version == "0" and not bad.paused
        with pytest.raises(ServiceError) as caught:
            await trainer.policy(1, weights_path=str(POLICY))
        assert caught.value.status == 409
        bad.broken.clear()

        async def back() -> bool:
            fleet = (await link.call("GET", "/v1/replicas", answer=dict[str, Any]))["replicas"]
            return {r["state"] for r in fleet} == {"ready"}

        await eventually(back, "the broken one has loaded the weights and is back")
        assert bad.version == "1" and bad.weights == str(POLICY)


async def test_a_swap_that_is_cancelled_leaves_no_engine_paused() -> None:
    async with MockEngine() as engine, EngineControl() as control:
        engine.hanging.add("/collective_rpc")
        swapping = asyncio.create_task(control.swap(engine.url, 1, POLICY))
        await eventually(lambda: engine.asked["/collective_rpc"], "it is loading")
        assert engine.paused
        swapping.cancel()
        await asyncio.gather(swapping, return_exceptions=True)
        assert swapping.cancelled() and not engine.paused


async def test_rollouts_sample_from_the_adapter_that_their_session_names(
    layout: RunLayout, tmp_path: Path, script: Script, chat: ChatTokenizer
) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    async with (
        routed(layout) as link,
        AsyncRolloutClient(layout.root) as trainer,
        EngineClient() as client,
        MockEngine(script) as engine,
    ):
        await trainer.add_replica(engine.url)
        first, second, *_ = await leases_of(trainer, HandWorker(link, "w-1-a"), 16)
        await Rollout(link, client, chat, first).play()
        assert engine.models == {None}
        await trainer.policy(1, weights_path=str(tmp_path), adapter="lora-a")
        engine.models.clear()
        await Rollout(link, client, chat, second).play()
        assert engine.models == {"lora-a"}


async def test_run_waits_for_the_fleet_and_its_polls_are_woken_by_the_first_replica(layout: RunLayout) -> None:
    async with (
        routed(layout, rules=Rules(lease_ttl_s=60.0), fleet=FleetRules(hold=True)) as link,
        AsyncRolloutClient(layout.root) as trainer,
        MockEngine() as engine,
    ):
        worker = HandWorker(link, "w-1-a")
        await trainer.submit([{"task_id": "toy-0"}], group_size=4)
        await worker.through("init")
        assert await worker.lease("run") == []
        polling = asyncio.create_task(worker.lease("run", wait_s=20.0))
        await trainer.add_replica(engine.url)
        assert len(await polling) == 4
