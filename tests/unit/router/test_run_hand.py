"""RUN's hand: two attempts of one rollout that meet in a worker, and what is left of one that is over: nothing."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import stages.pools.run
from sandbox.fake import FakeBackend
from stages.chat import ChatTokenizer
from stages.engine_client import Completion
from stages.handoff import SegmentWriter
from stages.model import StreamModel
from stages.pools.run import Policy, RunHand, Saving
from stages.protocols import Limits
from stages.trajectory import ModelIdentity, Sampling
from stages.wire import LeaseOut, RunInput, SessionOut
from tests.support.pools import POLICY, PlainTask, TurnsAgent, toy_store, versioned_engine
from tests.support.routers import make_run
from tests.support.waiting import eventually


class Link:
    """Gives one replica for every session."""

    async def call(self, *_: object, **__: object) -> SessionOut:
        return SessionOut("1", "r1", "http://r1", 0)


class Hung:
    """Two generations that nobody answers, then an engine that does."""

    def __init__(self) -> None:
        self.asked, self._real = 0, versioned_engine()

    async def context_length(self, url: str) -> int:
        return 4096

    async def generate(self, url: str, token_ids: Sequence[int], sampling: Sampling, **more: Any) -> Completion:
        self.asked += 1
        if self.asked <= 2:
            await asyncio.Event().wait()
        return await self._real.generate(url, token_ids, sampling, **more)


@asynccontextmanager
async def run_hand(scratch: Path, engine: Any) -> AsyncIterator[tuple[RunHand, list[LeaseOut]]]:
    """A hand, and two attempts of one rollout for it."""
    layout, row = make_run(scratch / "run"), {"task_id": "toy-0", "question": "1 + 1"}
    given = msgspec.Raw(msgspec.json.encode(RunInput(row, [], Sampling(), 60.0, "g1", "toy-0", "")))
    leases = [LeaseOut(str(attempt), "g1-0", attempt, "run", 30.0, given) for attempt in (1, 2)]
    async with FakeBackend(layout.root) as backend, SegmentWriter(layout, "run-1-toy") as segments:
        yield RunHand(
            PlainTask(), TurnsAgent(), Limits(), Policy(ChatTokenizer.load(POLICY), ModelIdentity("tiny")),
            backend=backend, store=toy_store(layout), engine=engine, link=Link(), segments=segments,  # type: ignore[arg-type]
            saving=Saving(layout, scratch),
        ), leases  # fmt: skip


async def test_an_attempt_that_ends_late_takes_nothing_from_the_one_after_it(tmp_path: Path) -> None:
    engine = Hung()
    async with run_hand(tmp_path, engine) as (hand, leases):
        first, second = (asyncio.create_task(hand.work(lease)) for lease in leases)
        await eventually(lambda: engine.asked == 2, "both generate")
        first.cancel()
        await asyncio.wait([first])
        hand.sessions(moved=[], lost=["g1-0"])
        result = await asyncio.wait_for(second, 10)
        assert result.outcome == "ok"
        assert engine.asked == 3


async def test_the_trajectory_of_an_attempt_that_is_over_is_freed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[StreamModel]] = []

    class Known(StreamModel):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            made.append(weakref.ref(self))

    monkeypatch.setattr(stages.pools.run, "StreamModel", Known)
    gc.disable()
    try:
        async with run_hand(tmp_path, versioned_engine()) as (hand, leases):
            assert (await hand.work(leases[0])).outcome == "ok"
            assert [model() for model in made] == [None]
    finally:
        gc.enable()
