"""The steps of a job as the srun processes that hold them: started, spoken to, awaited, ended. No call to slurmctld.

A step is asked by words on its standard input. A signal to srun does less than it seems to (seen on Slurm 22.05): TERM
makes it kill its tasks at once, and USR2 reaches, where processes are tracked without cgroups, every process below a
task too, so that it would end the agents' own commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from signal import SIGKILL, SIGTERM, Signals
from typing import Final

from launch.errors import LaunchError
from launch.kinds import IN_JOB
from launch.slurm.render import read_steps
from launch.slurm.step import DRAIN, STOP
from stages.layout import RunLayout

STEP_MODULE: Final = "launch.slurm.step"
KILL_S: Final = 5.0


def parse_steps(text: str, attempt: int) -> dict[str, list[str]]:
    """Name -> command line, of the srun lines that stand in the batch script.

    Raises:
        LaunchError: a line starts no step of ours.
    """
    steps = {}
    for words in read_steps(text, attempt):
        if STEP_MODULE not in words or words.index(STEP_MODULE) + 2 >= len(words):
            raise LaunchError(f"the batch script has a step that is none: {' '.join(words)!r}; submit the run again")
        steps[words[words.index(STEP_MODULE) + 2]] = words
    return steps


class Steps:
    """The sruns of one job.

    Args:
        commands: name of the step -> its command line.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        self._commands = dict(commands)
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._waiting: dict[str, asyncio.Task[int]] = {}
        self._told_of: set[str] = set()
        """Steps whose end `next_end` has returned."""

    @property
    def names(self) -> list[str]:
        """In the order of the batch script."""
        return list(self._commands)

    async def start(self, attempt: int, more: Mapping[str, str] | None = None) -> None:
        """Start all at once, with `more` in their environment."""
        environment = {**os.environ, IN_JOB: str(attempt), **(more or {})}
        for name, words in self._commands.items():
            # A session of its own: what Slurm or a terminal sends to the batch shell's group reaches the leader alone.
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.PIPE, env=environment, start_new_session=True
            )
            self._running[name] = process
            self._waiting[name] = asyncio.create_task(process.wait(), name=name)

    def over(self, name: str) -> bool:
        """Whether a step has ended."""
        return name not in self._waiting or self._waiting[name].done()

    def code(self, name: str) -> int:
        """Exit code of a step that has ended; 128 + n where signal n ended its srun."""
        code = self._waiting[name].result()
        return code if code >= 0 else 128 - code

    async def next_end(self, *events: asyncio.Event, timeout_s: float | None = None) -> str | None:
        """The name of a step that has ended, each once; None where an event or the time came first.

        Also one that ended while nobody called this: a step may fail before the next one has been started.
        """
        alive = [task for name, task in self._waiting.items() if name not in self._told_of]
        watching = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait({*alive, *watching}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in watching:
                task.cancel()
        ended = next((name for name in self._waiting if self.over(name) and name not in self._told_of), None)
        if ended is not None:
            self._told_of.add(ended)
        return ended

    async def wait(self, name: str, timeout_s: float) -> int:
        """The exit code of a step; one that does not end in time is terminated."""
        await asyncio.wait({self._waiting[name]}, timeout=timeout_s)
        if not self.over(name):
            await self._end([name], 0.0)
        return self.code(name)

    def drain(self) -> None:
        """Ask every step to hand over what it holds; engines stay until the others are through."""
        for name in self.names:
            self._tell(name, DRAIN)

    def terminate(self, name: str) -> None:
        """Ask one step to end in order."""
        self._tell(name, STOP)

    async def end(self, timeout_s: float) -> None:
        """End what runs: first asked to, then killed."""
        await self._end([name for name in self._running if not self.over(name)], timeout_s)

    async def _end(self, names: Sequence[str], timeout_s: float) -> None:
        for number, patience_s in ((None, timeout_s), (SIGTERM, KILL_S), (SIGKILL, None)):
            waiting = {self._waiting[name] for name in names if not self.over(name)}
            if not waiting:
                return
            for name in names:
                self._tell(name, STOP) if number is None else self._send(name, number)
            await asyncio.wait(waiting, timeout=patience_s)

    def _tell(self, name: str, word: str) -> None:
        """Say a word to every task of a step: srun passes its standard input on to all of them."""
        pipe = self._running[name].stdin if not self.over(name) else None
        if pipe is not None and not pipe.is_closing():
            pipe.write(f"{word}\n".encode())

    def _send(self, name: str, number: Signals) -> None:
        if not self.over(name):
            with contextlib.suppress(ProcessLookupError):
                self._running[name].send_signal(number)

    @staticmethod
    def last_words(name: str, layout: RunLayout, attempt: int) -> str:
        """The last line of ours that a step's own logs hold."""
        said = []
        for log in sorted(layout.attempt_logs(attempt).glob(f"{name}-node*.log")):
            lines = log.read_text(errors="replace").splitlines()
            said += [line.removeprefix("rollmill: ") for line in lines if line.startswith("rollmill: ")]
        return said[-1] if said else "it said nothing"
