"""The engine's asyncio side: hands requests to the scheduler, steps it while there is work, wakes who waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

from stages.engine.qwen3 import Qwen3
from stages.engine.scheduler import Scheduler
from stages.engine.sequence import Sequence

PauseMode = Literal["keep", "wait", "abort"]


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
        self.paused = False
        self._frozen = False
        self._work = asyncio.Event()
        self._drained = asyncio.Event()
        self._held: list[Sequence] = []
        """Came while paused; they begin with `resume`."""
        self._waiting: dict[Sequence, asyncio.Event] = {}

    @property
    def queued(self) -> int:
        """Sequences that have not begun."""
        return self.scheduler.waiting + len(self._held)

    async def generate(self, sequence: Sequence) -> Sequence:
        """Run a sequence to its end; a caller that is cancelled takes its sequence with it.

        Raises:
            EngineError: the sequence does not fit the engine.
        """
        async for _ in self.stream(sequence):
            pass
        return sequence

    async def stream(self, sequence: Sequence) -> AsyncIterator[int]:
        """Run a sequence to its end; gives the number of drawn tokens whenever there are more, and at the end.

        Raises:
            EngineError: the sequence does not fit the engine.
        """
        if self.paused:
            self._held.append(sequence)
        else:
            self.scheduler.add(sequence)
        changed = self._waiting[sequence] = asyncio.Event()
        self._work.set()
        try:
            while True:
                await changed.wait()
                changed.clear()
                # Read before the caller takes its time: what is drawn meanwhile sets the event again.
                ended = sequence.finish_reason is not None
                yield len(sequence.drawn)
                if ended:
                    return
        finally:
            del self._waiting[sequence]
            self.abort(sequence)

    async def run(self) -> None:
        """Step for ever; an exception of the scheduler ends the process, for its state can no longer be trusted."""
        while True:
            if self._frozen or not self.scheduler.busy:
                self._drained.set()
                self._work.clear()
                await self._work.wait()
                continue
            for sequence in self.scheduler.step():
                self._tell(sequence)
            await asyncio.sleep(0)

    async def pause(self, mode: PauseMode) -> None:
        """Draw nothing more until `resume`; requests that come meanwhile are held.

        Args:
            mode: what becomes of those that run: `keep` freezes them, `wait` lets them end first, `abort` ends them
                where they stand.
        """
        self.paused = True
        if mode == "abort":
            self.abort_all()
        if mode == "wait":
            while self.scheduler.busy and self.paused:
                self._drained.clear()
                await self._drained.wait()
        self._frozen = self.paused

    def resume(self) -> None:
        """Go on with what was frozen, and begin what was held."""
        self.paused = self._frozen = False
        for sequence in self._held:
            self.scheduler.add(sequence)
        self._held.clear()
        self._work.set()
        self._drained.set()

    def replace_model(self, model: Qwen3) -> None:
        """See Scheduler."""
        self.scheduler.replace_model(model)

    def abort(self, sequence: Sequence) -> bool:
        """End a sequence where it stands: its caller gets what was drawn; False when it has ended already."""
        if sequence in self._held:
            self._held.remove(sequence)
            sequence.finish_reason = "abort"
        elif not self.scheduler.abort(sequence):
            return False
        self._tell(sequence)
        return True

    def abort_all(self) -> int:
        """End every sequence that has begun or waits to begin; gives how many."""
        return sum([self.abort(sequence) for sequence in list(self._waiting)])

    def _tell(self, sequence: Sequence) -> None:
        changed = self._waiting.get(sequence)
        if changed is not None and (sequence.streamed or sequence.finish_reason is not None):
            changed.set()
