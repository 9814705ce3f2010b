"""The asyncio side: waking, cancellation that aborts, and an idle loop that does nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from stages.engine.loop import EngineLoop
from stages.engine.qwen3 import Qwen3
from stages.engine.sampling import SamplingParams
from stages.engine.scheduler import Scheduler, SchedulerOptions
from stages.engine.sequence import Sequence


def _sequence(tokens: int) -> Sequence:
    return Sequence(prompt=[5, 6, 7], params=SamplingParams(max_tokens=tokens, ignore_eos=True), limit=tokens)


@asynccontextmanager
async def _running(model: Qwen3) -> AsyncIterator[EngineLoop]:
    loop = EngineLoop(Scheduler(model, SchedulerOptions(max_model_len=512, max_num_seqs=2)))
    task = asyncio.create_task(loop.run())
    try:
        yield loop
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _until(condition: Callable[[], bool]) -> None:
    """Turn the loop until the condition holds; the test's time-out is the deadline."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never held")


def test_answers_come_and_the_loop_sleeps_between(model: Qwen3) -> None:
    async def body() -> None:
        async with asyncio.timeout(30), _running(model) as loop:
            for count in (1, 5):
                done = await asyncio.gather(*(loop.generate(_sequence(4)) for _ in range(count)))
                assert [len(one.drawn) for one in done] == [4] * count
                spent = time.process_time()
                await asyncio.sleep(0.2)
                assert time.process_time() - spent < 0.1

    asyncio.run(body())


def test_a_cancelled_caller_takes_its_sequence_along(model: Qwen3) -> None:
    async def body() -> None:
        async with asyncio.timeout(30), _running(model) as loop:
            tasks = [asyncio.create_task(loop.generate(_sequence(500))) for _ in range(3)]
            await _until(lambda: loop.scheduler.running == 2)
            tasks[0].cancel()  # runs
            tasks[2].cancel()  # waits
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            assert (loop.scheduler.running, loop.scheduler.waiting) == (1, 0)
            assert len((await tasks[1]).drawn) == 500

    asyncio.run(body())


def test_abort_all_gives_callers_what_they_have(model: Qwen3) -> None:
    async def body() -> None:
        async with asyncio.timeout(30), _running(model) as loop:
            sequences = [_sequence(500) for _ in range(3)]
            tasks = [asyncio.create_task(loop.generate(one)) for one in sequences]
            await _until(lambda: len(sequences[0].drawn) >= 3)
            assert loop.abort_all() == 3
            done = await asyncio.gather(*tasks)
            assert [one.finish_reason for one in done] == ["abort"] * 3
            assert len(done[0].drawn) >= 3
            assert not loop.scheduler.busy

    asyncio.run(body())


def test_a_broken_scheduler_ends_the_loop(model: Qwen3, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        loop = EngineLoop(Scheduler(model, SchedulerOptions(max_model_len=512)))
        monkeypatch.setattr(loop.scheduler, "step", lambda: 1 // 0)
        waiting = asyncio.create_task(loop.generate(_sequence(4)))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(loop.run(), 10)
        waiting.cancel()

    asyncio.run(body())
