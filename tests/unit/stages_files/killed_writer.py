"""A writer process for the kill test: appends rows and handoff records and tells each range after its fsync."""

from __future__ import annotations

import asyncio
import itertools
from multiprocessing.connection import Connection
from pathlib import Path

from stages.handoff import SegmentWriter
from stages.layout import RunLayout
from stages.shards.writer import ShardWriter
from stages.trajectory import RowRange
from tests.unit.stages_files.samples import make_chain, make_result, make_row


def write_until_killed(root: Path, life: int, tell: Connection) -> None:
    """Several slots at once, each with rows of its own, for ever."""
    asyncio.run(_write(RunLayout(root), life, tell))


async def _write(layout: RunLayout, life: int, tell: Connection) -> None:
    numbers = itertools.count(life * 1_000_000)

    async def slot(shards: ShardWriter, segments: SegmentWriter) -> None:
        for number in numbers:
            place = await segments.append(make_result(number, bytes(2000)))
            tell.send((number, "segment", _plain(place)))
            place = await shards.append(make_row(number, [make_chain(200 + number % 300)] * (1 + number % 2)))
            tell.send((number, "shard", _plain(place)))

    async with (
        SegmentWriter(layout, f"run-{life}") as segments,
        ShardWriter(layout, f"eval-{life}") as shards,
        asyncio.TaskGroup() as slots,
    ):
        for _ in range(8):
            slots.create_task(slot(shards, segments))


def _plain(place: RowRange) -> tuple[str, int, int, int]:
    return place.path, place.offset, place.length, place.crc32
