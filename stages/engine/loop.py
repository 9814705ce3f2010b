"""The engine's asyncio side: hands requests to the scheduler, steps it while there is work, wakes who waits."""

from __future__ import annotations

import asyncio

from stages.engine.scheduler import Scheduler
from stages.engine.sequence import Sequence


class EngineLoop:
    """Runs a scheduler inside the server's event loop.

    A step is computed in the loop's own thread: it takes about a millisecond, every answer depends on it, and a thread
    would add two hand-overs to each token. Between steps the loop turns once, so requests are accepted and lost
    clients noticed.

    Args:
        scheduler: owned by this loop from here on.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._work = asyncio.Event()
        self._waiting: dict[Sequence, asyncio.Future[None]] = {}

    async def generate(self, sequence: Sequence) -> Sequence:
        """Run a sequence to its end; a caller that is cancelled takes its sequence with it.

        Raises:
            EngineError: the sequence does not fit the engine.
        """
        self.scheduler.add(sequence)
        done = asyncio.get_running_loop().create_future()
        self._waiting[sequence] = done
        self._work.set()
        try:
            await done
        finally:
            del self._waiting[sequence]
            self.scheduler.abort(sequence)
        return sequence

    async def run(self) -> None:
        """Step for ever; an exception of the scheduler ends the process, for its state can no longer be trusted."""
        while True:
            if not self.scheduler.busy:
                self._work.clear()
                await self._work.wait()
            for sequence in self.scheduler.step():
                if sequence.finish_reason is not None:
                    self._finish(sequence)
            await asyncio.sleep(0)

    def abort_all(self) -> int:
        """End every sequence where it stands: their callers get what was drawn so far, with finish reason abort."""
        ended = [sequence for sequence in self._waiting if self.scheduler.abort(sequence)]
        for sequence in ended:
            self._finish(sequence)
        return len(ended)

    def _finish(self, sequence: Sequence) -> None:
        done = self._waiting.get(sequence)
        if done is not None and not done.done():
            done.set_result(None)
