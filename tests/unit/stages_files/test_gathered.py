"""Blocking calls of many tasks in one turn of a thread: each caller has its own answer, also where others fail."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from stages.gathered import Gathered
from stages.handoff import SegmentWriter, wait_record
from tests.unit.stages_files.samples import make_layout, make_result


async def test_calls_of_one_turn_of_the_loop_share_a_turn_of_a_thread_and_nothing_else() -> None:
    made, threads = Gathered(), list[int]()

    def call(number: int) -> int:
        threads.append(threading.get_ident())
        if number % 2:
            raise ValueError(number)
        return number

    answers = await asyncio.gather(*(made.call(lambda n=n: call(n)) for n in range(6)), return_exceptions=True)
    assert [answer if isinstance(answer, int) else str(answer) for answer in answers] == [0, "1", 2, "3", 4, "5"]
    assert len(threads) == 6 and len(set(threads)) == 1 and threads[0] != threading.get_ident()


async def test_a_caller_that_is_gone_keeps_no_other_waiting() -> None:
    made, blocked, go_on = Gathered(), threading.Event(), threading.Event()

    def wait() -> None:
        blocked.set()
        assert go_on.wait(20)

    first, second = asyncio.create_task(made.call(wait)), asyncio.create_task(made.call(lambda: 2))
    assert await asyncio.to_thread(blocked.wait, 20)
    first.cancel()
    later = await made.call(lambda: 3)  # of another turn of the loop: it does not wait for these
    go_on.set()
    assert (later, await second) == (3, 2)
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_records_that_are_read_together_are_those_that_were_asked_for(tmp_path: Path) -> None:
    reads, layout = Gathered(), make_layout(tmp_path)
    async with SegmentWriter(layout, "run-1-a") as writer:
        records = [make_result(number, bytes(number)) for number in range(8)]
        places = [await writer.append(record) for record in records]
    assert await asyncio.gather(*(wait_record(layout.root, place, reads=reads) for place in places)) == records
