"""Processes killed at the n-th call to the file system, every n: what was acknowledged is there, each thing once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest

from stages.handoff import read_record
from stages.ledger.events import Rules
from stages.shards import ShardReader
from stages.trajectory import RowRange
from tests.support.crashes import Crash, write_until_killed
from tests.support.routers import make_run
from tests.support.stories import RouterProcess, forks, story
from tests.unit.stages_files.samples import make_layout, make_result, make_row, publish, rows_line

QUICK = Rules(lease_ttl_s=0.8)
"""A lease whose answer died with its router comes back soon."""
SIDE_BY_SIDE = 4
WRITER_CALLS = 8
LAST = 60
"""More calls of one kind than the story makes: a crash that never comes ends the search."""


async def crash_in_a_story(root: Path, crash: Crash) -> bool:
    """Whether the crash came; the story was told to its end and holds either way."""
    layout = make_run(root)
    routers, told = [RouterProcess(layout, crash, rules=QUICK)], asyncio.Event()

    async def keep() -> None:
        while not told.is_set():
            if routers[-1].ended:
                routers.append(RouterProcess(layout, rules=QUICK))
            await asyncio.sleep(0.01)

    keeping = asyncio.create_task(keep())
    try:
        async with asyncio.timeout(120), story(layout) as one:
            await one.tell(tasks=1)
    finally:
        told.set()
        await keeping
        for router in routers:
            await router.stop()
    if routers[-1].process.exitcode != 0:
        # It was killed while it came or left; what it left behind must do.
        routers.append(RouterProcess(layout, rules=QUICK))
        await routers[-1].serving()
        await routers[-1].stop()
    assert routers[-1].process.exitcode == 0
    one.check()
    return len(routers) > 1


@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename", "link", "unlink"])
async def test_a_router_killed_at_any_call_loses_nothing_that_it_acknowledged(tmp_path: Path, call: str) -> None:
    crashes = 0
    for first in range(0, LAST, SIDE_BY_SIDE):
        numbers = range(first, first + SIDE_BY_SIDE)
        came = await asyncio.gather(*(crash_in_a_story(tmp_path / f"{n}", Crash(call, n)) for n in numbers))
        crashes += sum(came)
        if not all(came):
            break
    assert {"link": 1, "rename": 2, "unlink": 1}.get(call, 5) <= crashes < LAST


@pytest.mark.parametrize("match", ["handoff/", "shards/"])
def test_writers_killed_at_any_call_keep_what_they_acknowledged(tmp_path: Path, match: str) -> None:
    layout, context = make_layout(tmp_path), forks()
    told: list[tuple[int, str, tuple[str, int, int, int]]] = []
    for life, (call, n) in enumerate((call, n) for call in ("open", "write", "fsync") for n in range(WRITER_CALLS)):
        if call == "open" and n > 0:
            continue  # a writer opens its file once
        mine, its = context.Pipe(duplex=False)
        process = context.Process(target=write_until_killed, args=(layout.root, life, its, Crash(call, n, match)))
        process.start()
        its.close()
        with contextlib.suppress(EOFError):
            while mine.poll(30):
                told.append(mine.recv())
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
        mine.close()
    assert {kind for _, kind, _ in told} == {"segment", "shard"}
    rows = [(number, RowRange(*place)) for number, kind, place in told if kind == "shard"]
    for number, kind, place in told:
        if kind == "segment":
            assert read_record(layout.root, RowRange(*place)) == make_result(number, bytes(2000))
    publish(layout, [rows_line(seq, make_row(number), place) for seq, (number, place) in enumerate(rows, 1)])
    with ShardReader(layout.root, visibility_s=0) as reader:
        assert [row.rollout_id for row in reader] == [f"r{number}" for number, _ in rows]
