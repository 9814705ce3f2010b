"""Writers killed at random moments: acknowledged ranges read back, torn ones never show."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from stages.errors import ShardError
from stages.handoff import read_record
from stages.layout import RunLayout
from stages.shards import ShardReader
from stages.shards.writer import ShardWriter
from stages.trajectory import RowRange
from tests.unit.stages_files.killed_writer import write_until_killed
from tests.unit.stages_files.samples import make_chain, make_layout, make_result, make_row, publish, rows_line

LIVES = 100
SEED = 7

Told = tuple[int, str, tuple[str, int, int, int]]


def one_life(context: ForkServerContext, layout: RunLayout, life: int, grace_s: float) -> list[Told]:
    """What a writer told before it was killed, `grace_s` after its first acknowledgement."""
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=write_until_killed, args=(layout.root, life, its))
    process.start()
    its.close()
    told: list[Told] = []
    try:
        assert mine.poll(30), "the writer acknowledged nothing"
        end = time.monotonic() + grace_s
        while mine.poll(max(0.0, end - time.monotonic())) and time.monotonic() < end:
            told.append(mine.recv())
    finally:
        process.kill()
        process.join(30)
    told += rest(mine)
    mine.close()
    return told


def rest(pipe: Connection) -> list[Told]:
    """What still lies in the pipe of a dead writer; its last message may be cut."""
    told: list[Told] = []
    try:
        while pipe.poll(0):
            told.append(pipe.recv())
    except (EOFError, OSError):
        pass
    return told


def test_b28_what_was_acknowledged_is_there_after_a_hundred_kills(tmp_path: Path) -> None:
    layout, draw = make_layout(tmp_path), random.Random(SEED)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.stages_files.killed_writer"])
    told = [message for life in range(LIVES) for message in one_life(context, layout, life, draw.uniform(0.0, 0.03))]
    assert {number // 1_000_000 for number, _, _ in told} == set(range(LIVES))
    ended: dict[str, int] = {}
    shards: list[tuple[int, RowRange]] = []
    for number, kind, plain in told:
        place = RowRange(*plain)
        ended[place.path] = max(ended.get(place.path, 0), place.offset + place.length)
        if kind == "segment":
            assert read_record(layout.root, place) == make_result(number, bytes(2000))
        else:
            shards.append((number, place))
    publish(layout, [rows_line(seq, make_row(number), place) for seq, (number, place) in enumerate(shards, 1)])
    with ShardReader(layout.root, visibility_s=0) as reader:
        for (number, _), row in zip(shards, reader, strict=True):
            assert row.rollout_id == f"r{number}"
            assert len(row.chains) == 1 + number % 2
            assert row["token_ids"] == make_chain(200 + number % 300).token_ids
    # The kills did hit writers in mid-work: some files go on beyond what was acknowledged.
    assert sum(layout.resolve(path).stat().st_size > end for path, end in ended.items()) >= LIVES // 20


async def test_b28_a_range_that_is_short_or_altered_is_never_shown(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    rows = [make_row(number, [make_chain(200)]) for number in range(2)]
    async with ShardWriter(layout, "eval-1-x") as shards:
        places = [await shards.append(row) for row in rows]
    publish(layout, [rows_line(seq, row, place) for seq, (row, place) in enumerate(zip(rows, places, strict=True), 1)])
    path, whole = layout.resolve(places[1].path), layout.resolve(places[1].path).read_bytes()
    middle = places[1].offset + places[1].length - 64
    altered = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for damaged in (whole[:-8], altered):
        path.write_bytes(damaged)
        shown = []
        with ShardReader(layout.root, visibility_s=0) as reader, pytest.raises(ShardError):
            for row in reader:
                shown.append(row.rollout_id)  # noqa: PERF401 - what came before the error counts
        assert shown == ["r0"]
