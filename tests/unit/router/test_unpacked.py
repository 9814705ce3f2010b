"""What workers unpack on their node is gone when they are done with it, also where they were cancelled meanwhile."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sandbox.fake import FakeBackend
from sandbox.records import ShellState
from stages.checkpoint import Checkpoint, StreamState
from stages.handoff import SegmentWriter
from stages.pools import eval as eval_pool
from stages.pools import turns
from stages.pools.eval import EvalHand, RunNames
from stages.shards.writer import ShardWriter
from stages.trajectory import CheckpointRange, Sampling
from stages.wire import EvalInput, LeaseOut, RunInput
from tests.support.pools import PlainTask, toy_store
from tests.support.routers import make_run
from tests.support.waiting import eventually
from tests.unit.stages_files.samples import make_result


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_workspace_is_taken_away_also_where_grading_is_cancelled_while_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    layout, scratch, go_on = make_run(tmp_path / "run"), tmp_path / "scratch", threading.Event()
    scratch.mkdir()

    def unpack(archive: object, directory: Path, **_: object) -> None:
        directory.mkdir()
        go_on.wait(20)

    monkeypatch.setattr(eval_pool, "unpack", unpack)
    left: Any = msgspec.structs.replace(make_result(1), workspace=b"x", workspace_digest="sha256:0")
    async with (
        FakeBackend(layout.root) as backend,
        SegmentWriter(layout, "run-1-toy") as segments,
        ShardWriter(layout, "eval-1-toy") as shards,
    ):
        hand = EvalHand(
            PlainTask(), RunNames("toy-run", "collect", "toy", "turns"), layout, backend=backend,
            store=toy_store(layout), shards=shards, scratch=scratch, visibility_s=5.0,
        )  # fmt: skip
        row = {"task_id": "toy-0", "question": "1 + 1", "answer": 2}
        given = EvalInput(row, [], await segments.append(left), 60.0, "g1", "toy-0", "", "ok", "", 0, 0.0, 0, 0, 0, 0)
        lease = LeaseOut("1", left.rollout_id, 1, "eval", 30.0, msgspec.Raw(msgspec.json.encode(given)))
        grading = asyncio.create_task(hand.work(lease))
        await eventually(lambda: any(scratch.rglob("layer")), "it is being unpacked")
        if cancelled:
            grading.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait([grading])
        assert grading.cancelled() == cancelled
        assert list(scratch.iterdir()) == []


async def test_a_checkpoint_is_taken_away_also_where_its_attempt_is_cancelled_while_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, scratch, go_on = make_run(tmp_path / "run"), tmp_path / "scratch", threading.Event()
    ended = threading.Event()
    scratch.mkdir()

    def unpack(archive: object, directory: Path, **_: object) -> None:
        directory.mkdir()
        go_on.wait(20)
        (directory / "late").mkdir(parents=True)
        ended.set()

    monkeypatch.setattr(turns, "unpack", unpack)
    stream = StreamState([], [], [], [], [], None, True, 0, 0.0, 0.0)
    record = Checkpoint(
        rollout_id="g1-0", attempt=1, stream=stream, shell=ShellState("/", ""), layers=[], spent_s=1.0, nodes=["n"],
        finished_at=1.0, layer_digest="sha256:0", layer=b"x",
    )  # fmt: skip
    async with SegmentWriter(layout, "run-1-toy") as segments:
        place = await segments.append(record)
        found = CheckpointRange(place.path, place.offset, place.length, place.crc32)
        given = RunInput({}, [], Sampling(), 60.0, "g1", "toy-0", "", found)

        async def attempt() -> None:
            async with turns.restored(layout.root, given, scratch, 5.0):
                raise AssertionError("it was cancelled before")

        restoring = asyncio.create_task(attempt())
        await eventually(lambda: any(scratch.rglob("upper")), "it is being unpacked")
        restoring.cancel()
        await asyncio.wait([restoring], timeout=0.2)  # it may not be over before its thread is
        go_on.set()
        await asyncio.to_thread(ended.wait, 20)
        await asyncio.wait([restoring])
        assert restoring.cancelled()
        assert list(scratch.iterdir()) == []
