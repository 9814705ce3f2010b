"""Real worker loops behind a network that drops, delays, repeats and halves what goes over it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from pathlib import Path

import pytest

from stages.client import AsyncRolloutClient
from stages.ledger.events import Rules
from stages.trajectory import RowRange
from stages.wire import CommitRow, LeaseOut, Stage
from stages.worker import Result, Stagehand, Worker
from tests.support import runs
from tests.support.proxy import FAULTS, ProxiedLink, proxied
from tests.support.routers import make_run, routed
from tests.support.waiting import eventually

STAGES: tuple[Stage, ...] = ("init", "run", "eval")
TASKS, GROUP_SIZE = 12, 4


class QuickHand(Stagehand):
    """Does nothing, quickly, and leaves another range each time."""

    timeout_class = "infrastructure"

    def __init__(self, stage: Stage, seed: int) -> None:
        self._stage, self._draw, self._offsets = stage, random.Random(seed), itertools.count(8, 8)

    @property
    def warm(self) -> list[str]:
        return []

    async def work(self, lease: LeaseOut) -> Result:
        await asyncio.sleep(self._draw.uniform(0.0, 0.05))
        if self._stage == "init":
            return Result(layer="sha256:" + "1" * 64)
        if self._stage == "run":
            return Result(segment=RowRange("handoff/x-0.seg", next(self._offsets), 8, 1))
        return Result(row=CommitRow("shards/x-0.arrows", next(self._offsets), 8, 1, 1.0, None, 1, 3))


@pytest.mark.parametrize("seed", range(4))
async def test_workers_behind_a_bad_network_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    layout = make_run(tmp_path / "run")
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(routed(layout, rules=Rules(lease_ttl_s=1.5)))
        proxy = await stack.enter_async_context(proxied(seed, 0.3))
        trainer = await stack.enter_async_context(AsyncRolloutClient(layout.root))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        workers = []
        for stage in STAGES:
            link = await stack.enter_async_context(ProxiedLink("worker", run_dir=layout.root, patience_s=30))
            link.proxy = proxy
            await link.locate()
            hand = QuickHand(stage, seed)
            worker = Worker(link, hand, member=f"{stage}-1-a", stage=stage, slots=8, heartbeat_s=0.3)
            workers.append((worker, tasks.create_task(worker.run(grace_s=1))))
        ask = [{"task_id": f"toy-{number}"} for number in range(TASKS)]
        await trainer.submit(ask, group_size=GROUP_SIZE)

        async def all_closed() -> bool:
            return len(runs.index(layout.root)) == TASKS * (GROUP_SIZE + 1)

        await eventually(all_closed, "every group closes", 120)
        for worker, _ in workers:
            worker.drain()
        for _, running in workers:
            await asyncio.wait_for(running, 60)
    runs.exactly_once(layout.root, TASKS * GROUP_SIZE)
    assert runs.published(layout.root) == runs.index(layout.root)
    counts = runs.replayed(layout.root).state.counts
    assert counts.completed == TASKS * GROUP_SIZE
    assert len(set(FAULTS) & proxy.met.keys()) >= 4
