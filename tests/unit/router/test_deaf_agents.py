"""Agents that take their cancellation for any error of a step: an attempt ends when its time is over all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from sandbox.fake import FakeBackend
from sandbox.protocols import Sandbox
from stages.chat import ChatTokenizer
from stages.handoff import SegmentWriter
from stages.pools import run
from stages.pools.run import Policy, RunHand, Saving
from stages.protocols import Limits, Row
from stages.trajectory import ModelIdentity, Sampling
from stages.wire import LeaseOut, RunInput
from tests.support.pools import POLICY, PlainTask, TurnsAgent, toy_store, versioned_engine
from tests.support.routers import make_run
from tests.unit.router.test_run_hand import Link


@pytest.mark.parametrize("deaf", [1, 1000], ids=["it ends later", "it never ends"])
async def test_an_agent_that_does_not_end_when_its_time_is_over_keeps_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: int
) -> None:
    monkeypatch.setattr(run, "CANCEL_S", 0.1)
    never, told = asyncio.Event(), 0

    async def step(row: Row, turn: int, sandbox: Sandbox) -> None:
        nonlocal told
        while told < deaf:
            try:
                await never.wait()
            except BaseException:  # noqa: BLE001 - as such agents do
                told += 1

    layout, row = make_run(tmp_path / "run"), {"task_id": "toy-0", "question": "1 + 1"}
    given = msgspec.json.encode(RunInput(row, [], Sampling(), 0.2, "g1", "toy-0", ""))
    async with FakeBackend(layout.root) as backend, SegmentWriter(layout, "run-1-toy") as segments:
        hand = RunHand(
            PlainTask(), TurnsAgent(act=step), Limits(), Policy(ChatTokenizer.load(POLICY), ModelIdentity("tiny")),
            backend=backend, store=toy_store(layout), engine=versioned_engine(), link=Link(), segments=segments,  # type: ignore[arg-type]
            saving=Saving(layout, tmp_path),
        )  # fmt: skip
        lease = LeaseOut("1", "g1-0", 1, "run", 30.0, msgspec.Raw(given))
        result = await asyncio.wait_for(hand.work(lease), 10)
        assert result.outcome == "policy_timeout" and result.segment is not None
        told = deaf
        never.set()
