"""Readers through stale caches: old sizes, old entries, ESTALE and files in the wrong order are waited for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from stages import beacon, sharedfs
from stages.beacon import Beacon
from stages.errors import RouterUnreachableError
from stages.handoff import SegmentWriter, wait_record
from stages.http import RouterLink
from stages.shards import ShardReader
from stages.shards.index import IndexFollower, IndexLine
from tests.support.routers import make_run
from tests.support.stale import StaleFileSystem
from tests.support.waiting import eventually
from tests.unit.stages_files.samples import (
    group_line,
    make_layout,
    make_result,
    make_row,
    publish,
    rows_line,
    write_rows,
)

SEEDS = range(12)


def written(root: Path) -> tuple[Path, list[IndexLine]]:
    """A run of two epochs, the second of which cuts the first, and its lines as they count."""
    layout = make_layout(root)
    rows = [make_row(number, group=f"g{number // 4}") for number in range(16)]
    places = [*write_rows(layout, rows[:8], "eval-1-a"), *write_rows(layout, rows[8:], "eval-2-b")]
    lines: list[IndexLine] = []
    for number, (row, place) in enumerate(zip(rows, places, strict=True)):
        lines.append(rows_line(len(lines) + 1, row, place))
        if number % 4 == 3:
            lines.append(group_line(len(lines) + 1, row.group_id, [f"r{n}" for n in range(number - 3, number + 1)]))
    publish(layout, lines[:11], epoch=1)  # the last one after the second router had looked
    publish(layout, lines[10:], epoch=2, after=10)
    beacon.write(layout, Beacon(2, "http://127.0.0.1:1", "n", 1))
    return layout.root, lines


@pytest.mark.parametrize("seed", SEEDS)
def test_the_index_follower_gives_every_line_once_and_in_order(tmp_path: Path, seed: int) -> None:
    root, lines = written(tmp_path)
    stale = StaleFileSystem(seed)
    with sharedfs.use(stale):
        follower, seen = IndexFollower(root), list[IndexLine]()
        for _ in range(200):
            seen += follower.poll()
    assert seen == lines
    assert stale.shown


@pytest.mark.parametrize("seed", range(4))
def test_a_following_reader_gets_every_row(tmp_path: Path, seed: int) -> None:
    root, lines = written(tmp_path)
    expected = [line.rollout_id for line in lines if line.type == "rows"]
    with sharedfs.use(StaleFileSystem(seed, looks=2)), ShardReader(root, follow=True, visibility_s=20) as reader:
        watchdog = threading.Timer(30, reader.stop)
        watchdog.start()
        seen = []
        for row in reader:
            seen.append(row.rollout_id)
            if len(seen) == len(expected):
                break
        watchdog.cancel()
    assert seen == expected


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_committed_record_is_waited_for(tmp_path: Path, seed: int) -> None:
    layout = make_layout(tmp_path)
    async with SegmentWriter(layout, "run-1-a") as segments:
        places = [await segments.append(make_result(number, bytes(100))) for number in range(3)]
    with sharedfs.use(StaleFileSystem(seed)):
        for number, place in enumerate(places):
            assert await wait_record(layout.root, place, visibility_s=20) == make_result(number, bytes(100))


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_router_is_found(tmp_path: Path, seed: int) -> None:
    layout = make_run(tmp_path)
    beacon.write(layout, Beacon(7, "http://127.0.0.1:9", "n", 1))
    with sharedfs.use(StaleFileSystem(seed, match="router.json")):
        async with RouterLink("worker", run_dir=layout.root) as link:

            async def found() -> bool:
                try:
                    await link.locate()
                except RouterUnreachableError:
                    return False
                return True

            await eventually(found, "the router is found")
    assert link.epoch == 7
