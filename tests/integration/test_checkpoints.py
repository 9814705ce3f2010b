"""Turn checkpoints by real workers against a real router: what is kept, what is counted, what orphans do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from sandbox.fake import FakeBackend
from sandbox.protocols import Sandbox
from stages.client import AsyncRolloutClient
from stages.errors import RouterUnreachableError, ServiceError
from stages.journal.history import read_events
from stages.layout import RunLayout
from stages.ledger.events import CommitItem, Committed, Rules
from stages.protocols import Limits, Model, Row
from stages.trajectory import Message
from tests.support.pools import TurnsAgent, run_pool, until_closed, versioned_engine, working
from tests.support.routers import HandWorker, make_run, routed
from tests.support.waiting import eventually

TASKS = [{"task_id": f"toy-{i}"} for i in range(2)]
GRACE_S = 2.0
SAID = 3
"""Tokens of what the scripted policy says in a turn."""


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "run")


class Goes(TurnsAgent):
    """Four turns, each followed by an action that may hang; can be taken up."""

    def __init__(self, hang_at: int | None = None) -> None:
        super().__init__(4)
        self.hang_at = hang_at
        self.hanging = 0
        self.acted: list[int] = []
        self.begun: list[list[Message]] = []

    async def run(self, row: Row, model: Model, sandbox: Sandbox, limits: Limits) -> None:
        await self.resume(row, model, sandbox, limits, [Message("user", row["question"])])

    async def resume(
        self, row: Row, model: Model, sandbox: Sandbox, limits: Limits, messages: Sequence[Message]
    ) -> None:
        self.begun.append(list(messages))
        said = list(messages)
        while True:
            turns = sum(message.role == "assistant" for message in said)
            if said[-1].role == "assistant":
                await self._act_on(turns)
                said.append(Message("user", f"after {turns}"))
            if turns == 4:
                return
            said.append(await model.generate(messages=said))

    async def _act_on(self, turns: int) -> None:
        self.acted.append(turns)
        if turns == self.hang_at:
            self.hanging += 1
            await asyncio.Event().wait()


def items(layout: RunLayout, outcome: str) -> list[CommitItem]:
    events = [event for event in read_events(layout) if isinstance(event, Committed)]
    return [item for event in events for item in event.commits if item.outcome == outcome and item.layer is None]


async def test_an_agent_stopped_amid_its_turn_does_the_action_again_and_no_token_is_lost(layout: RunLayout) -> None:
    first, second = Goes(hang_at=2), Goes()
    async with routed(layout), AsyncRolloutClient(layout.root) as trainer:
        await trainer.submit(TASKS)
        async with working(layout, "init"):
            async with run_pool(layout, first, versioned_engine(), member="run-1-old", grace_s=GRACE_S) as old:
                await eventually(lambda: first.hanging == 2, "both hang in their second turn")
                await old.drain()
            async with run_pool(layout, second, versioned_engine(), member="run-1-new"), working(layout, "eval"):
                await until_closed(trainer, 2)
        status = await trainer.status()
    back = items(layout, "given_back")
    assert [item.checkpoint.turns for item in back if item.checkpoint] == [2, 2]
    assert (status["wasted_tokens"], status["checkpoints"]) == (0, 2)
    assert all([message.role for message in begun] == ["user", "assistant"] * 2 for begun in second.begun)
    assert sorted(second.acted) == [2, 2, 3, 3, 4, 4]


async def test_an_agent_that_cannot_be_taken_up_starts_anew_and_its_tokens_are_counted(layout: RunLayout) -> None:
    reached = []

    async def hangs(row: Row, turn: int, sandbox: Sandbox) -> None:
        if turn == 2:
            reached.append(row["task_id"])
            await asyncio.Event().wait()

    engine = versioned_engine()
    async with routed(layout), AsyncRolloutClient(layout.root) as trainer:
        await trainer.submit(TASKS)
        async with working(layout, "init"):
            async with run_pool(layout, TurnsAgent(4, hangs), engine, member="run-1-old", grace_s=GRACE_S) as old:
                await eventually(lambda: len(reached) == 2, "both hang in their third turn")
                await old.drain()
            async with run_pool(layout, TurnsAgent(4), engine, member="run-1-new"), working(layout, "eval"):
                rows, _ = await until_closed(trainer, 2)
        status = await trainer.status()
    assert [(item.checkpoint, item.wasted_tokens) for item in items(layout, "given_back")] == [(None, 2 * SAID)] * 2
    assert (status["wasted_tokens"], status["checkpoints"]) == (4 * SAID, 0)
    assert {row["status"] for row in rows.values()} == {"completed"}


async def test_a_checkpoint_that_cannot_be_read_costs_its_tokens_and_nothing_else(layout: RunLayout) -> None:
    first, second = Goes(hang_at=3), Goes()
    async with routed(layout), AsyncRolloutClient(layout.root) as trainer:
        await trainer.submit(TASKS[:1])
        async with working(layout, "init"):
            async with run_pool(layout, first, versioned_engine(), member="run-1-old", grace_s=GRACE_S) as old:
                await eventually(lambda: first.hanging == 1, "it hangs in its third turn")
                await old.drain()
            (place,) = [item.checkpoint for item in items(layout, "given_back") if item.checkpoint]
            segment = layout.resolve(place.path)
            damaged = bytearray(segment.read_bytes())
            damaged[place.offset + place.length // 2] ^= 1
            segment.write_bytes(damaged)
            async with (
                run_pool(layout, second, versioned_engine(), member="run-1-new", visibility_s=0.2),
                working(layout, "eval"),
            ):
                rows, _ = await until_closed(trainer, 1)
        status = await trainer.status()
    assert status["wasted_tokens"] == place.tokens == 3 * SAID
    assert len(second.begun[0]) == 1 and {row["status"] for row in rows.values()} == {"completed"}


async def test_the_newest_checkpoint_of_a_lost_lease_is_handed_on_and_the_service_time_with_it(
    layout: RunLayout,
) -> None:
    place = {"path": "handoff/run-1-a-0.seg", "offset": 0, "length": 64, "crc32": 1, "turns": 3, "tokens": 30}
    older = {**place, "offset": 64, "turns": 2, "tokens": 20}
    async with routed(layout, rules=Rules(max_attempts=2)) as link, AsyncRolloutClient(layout.root) as trainer:
        await trainer.submit(TASKS[:1])
        worker = HandWorker(link, "run-1-a")
        await worker.through("init")
        (lease,) = await worker.lease("run")
        assert "checkpoint" not in lease["input"]
        assert await worker.commit(lease, "checkpoint", checkpoint=place, segment=None) == "ok"
        assert await worker.commit(lease, "checkpoint", checkpoint=older, segment=None) == "ok"
        assert (await worker.heartbeat([lease["lease_id"]]))["renewed"] == [lease["lease_id"]]
        with pytest.raises(ServiceError, match=r"commits\.checkpoint"):
            await worker.commit(lease, "checkpoint", segment=None)
        await link.call("DELETE", "/v1/members/run-1-a", answer=bytes)
        (again,) = await HandWorker(link, "run-1-b").lease("run")
        assert again["input"]["checkpoint"] == place and again["attempt"] == 2
        assert await worker.commit(lease, "checkpoint", checkpoint=place, segment=None) == "superseded"


async def test_a_worker_that_no_router_answers_stops_its_sandboxes_and_ends(layout: RunLayout) -> None:
    hanging = Goes(hang_at=1)
    async with FakeBackend(layout.root) as backend, contextlib.AsyncExitStack() as stack:
        async with routed(layout):
            async with AsyncRolloutClient(layout.root) as trainer:
                await trainer.submit(TASKS[:1])
            async with working(layout, "init"):
                pool = run_pool(layout, hanging, versioned_engine(), backend=backend, patience_s=0.5)
                living = await stack.enter_async_context(pool)
                await eventually(lambda: hanging.hanging == 1, "the rollout hangs")
        with pytest.raises(RouterUnreachableError, match="nothing for"):
            await asyncio.wait_for(living.task, 20)
        assert len(backend.sandboxes) == 1
        await eventually(lambda: backend.sandboxes[0]._stopped, "its sandbox stops")
