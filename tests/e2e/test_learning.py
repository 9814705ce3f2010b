"""The trainer's loop on a real service: versions pushed while it samples, its router and the trainer itself killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path
from typing import Any

from conf.training import Heldout, Train
from stages import manifest
from stages.chat import ChatTokenizer
from stages.client import AsyncRolloutClient
from stages.layout import RunLayout
from stages.shards import ShardReader
from tests.support import runs
from tests.support.numpy_policy import POLICIES, NumpyPolicy
from workflows.tasks import sums
from workflows.train.loop import Plan, Trainer
from workflows.train.records import State

TASKS = 64
UPDATES, MINIBATCHES = 3, 2
PROBLEMS = 24


class Killed(Exception):
    """Stands for kill -9 of the trainer."""


class Mortal(NumpyPolicy):
    """Dies in the middle of the second update of its first life; the router dies there too."""

    def __init__(self, scratch: Path, run_dir: Path, dies: bool) -> None:
        super().__init__(scratch, UPDATES * MINIBATCHES)
        self._run_dir, self._dies = run_dir, dies

    def update(self, *given: Any) -> None:
        super().update(*given)
        if self._dies and self.steps == MINIBATCHES + 1:
            (router,) = [member["pid"] for member in runs.members(self._run_dir) if member["kind"] == "router"]
            os.kill(router, signal.SIGKILL)
            raise Killed


async def train(run_dir: Path, scratch: Path, *, dies: bool) -> State:
    found = manifest.read(RunLayout(run_dir))
    assert found is not None
    keys = Train(
        mode="async", steps=UPDATES, groups=3, minibatches=MINIBATCHES, heldout=Heldout(problems=PROBLEMS, every=0)
    )  # fmt: skip
    plan = Plan(run_dir, found.run_id, 4, 1, {"temperature": 1.0, "top_p": 1.0, "max_tokens": 64, "seed": 1}, 4096, 20)
    heldout = [
        {"task_id": row["task_id"], "data": row}
        for row in itertools.islice(sums.generate(3000, "heldout", 0.0), PROBLEMS)
    ]
    tasks = [f"arith-0-{number}" for number in range(TASKS)]
    chat = ChatTokenizer.load(POLICIES / "tiny-half")
    trainer = Trainer(keys, plan, Mortal(scratch, run_dir, dies), chat, tasks, heldout)
    async with AsyncRolloutClient(run_dir) as client:
        with ShardReader(run_dir) as reader:
            return await trainer.to_the_end(client, reader)


def test_versions_reach_the_fleet_every_token_is_of_the_version_it_names_and_no_group_counts_twice(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    serve = ("workflow=serve", f"task.limit={TASKS}", "fleet.model=tiny-half", "sampling.max_tokens=64")
    with runs.running(run_dir, *serve) as process:
        runs.poll(lambda: any(member["kind"] == "eval" for member in runs.members(run_dir)), "the service")
        try:
            asyncio.run(train(run_dir, tmp_path / "scratch", dies=True))
            raise AssertionError("it lived")
        except Killed:
            state = asyncio.run(train(run_dir, tmp_path / "scratch", dies=False))
        assert process.poll() is None, process.communicate()
        closed = [line["group_id"] for line in runs.index(run_dir) if line["type"] == "group"]
    records = state.records
    assert [record.step for record in records] == [0, 1, 2, 3] and max(record.lag_max for record in records) <= 1
    assert all(record.gap_tokens > 0 and record.gap_max <= 1e-4 for record in records[1:])
    used = [group for record in records for group in record.groups]
    assert len(used) == len(set(used)) >= UPDATES and set(used) <= set(closed)
    first, last = records[0].heldout, records[-1].heldout
    assert first is not None and last is not None and first < 0.75 < 0.9 <= last
    assert len(list(runs.index(run_dir))) == len({line["seq"] for line in runs.index(run_dir)})
