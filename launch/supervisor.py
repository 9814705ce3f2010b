"""Keeps processes of a run alive on this node: starts them, restarts what dies, ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from launch.errors import LaunchError
from launch.forked import ForkError, ForkServer, Process
from launch.kinds import supervised
from stages import sharedfs
from stages.errors import RouterUnreachableError, ServiceError
from stages.identity import member_id
from stages.layout import RunLayout

BODY = "launch.process"
"""The module that each process runs."""
RESTARTS: Final = 8
RESTART_WINDOW_S: Final = 60.0
BACKOFF_S: Final = (0.05, 2.0)
END_S: Final = {"router": 10.0, "replica": 8.0}
END_WORKER_S: Final = 30.0
ORDER: Final = (("init", "run", "eval"), ("replica",), ("router",))


Slot = tuple[str, int]
"""Kind and number of a process; the number is unique in its kind over the whole run."""


class ChildFailedError(LaunchError):
    """A process of the run dies again and again; the message quotes the last thing it said."""


def numbered(counts: Iterable[tuple[str, int]]) -> list[Slot]:
    """The slots of so many processes of each kind, counted from 1."""
    return [(kind, number) for kind, count in counts for number in range(1, count + 1)]


class Supervisor:
    """The processes of a run that one node keeps.

    Args:
        layout: the run directory.
        slots: the processes to keep.
        attempt: names the log directory.
        say: shows a line to the person who started the run.
        forks: forks the processes of its kinds; without it each is started with its own command line.
    """

    def __init__(
        self,
        layout: RunLayout,
        slots: Iterable[Slot],
        attempt: int,
        say: Callable[[str], None],
        forks: ForkServer | None = None,
    ) -> None:
        self._layout, self._attempt, self._say, self._forks = layout, attempt, say, forks
        self._slots = list(slots)
        self._running: dict[Slot, Process] = {}
        self._ending: set[str] = set()
        """Kinds that are not started again."""
        self._keeping: asyncio.Task[None] | None = None

    def keep(self) -> asyncio.Task[None]:
        """The task of `keep_all`, begun by whoever asks first."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self.keep_all(), name="supervisor")
        return self._keeping

    async def keep_all(self) -> None:
        """Keep every process running until `stop`.

        Raises:
            ChildFailedError: one cannot be kept alive.
        """
        async with asyncio.TaskGroup() as tasks:
            for slot in self._slots:
                tasks.create_task(self._keep(*slot), name=f"{slot[0]}-{slot[1]}")

    async def _keep(self, kind: str, number: int) -> None:
        deaths: list[float] = []
        while kind not in self._ending:
            member = member_id(kind, number)
            process = await self._start(kind, number, member)
            if kind in self._ending:  # asked to end while it was being started: `end` did not see it
                _ask_to_end(process)
            code = await process.wait()
            del self._running[kind, number]
            if kind in self._ending:
                return
            deaths = [t for t in deaths if t > time.monotonic() - RESTART_WINDOW_S] + [time.monotonic()]
            last = self._last_words(kind, number)
            if len(deaths) > RESTARTS or (code == 2 and len(deaths) == 1):
                raise ChildFailedError(f"{kind}-{number} ended with {_ending(code)} {len(deaths)} times: {last}")
            self._say(f"{kind}-{number} ended with {_ending(code)}; started again")
            await self._bury(member)
            await asyncio.sleep(min(BACKOFF_S[1], BACKOFF_S[0] * 2 ** (len(deaths) - 1)))

    async def _start(self, kind: str, number: int, member: str) -> Process:
        words = [kind, str(self._layout.root), str(number), member]
        process = await self._forked(kind, words, self._log(kind, number))
        if process is None:
            with self._log(kind, number).open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", BODY, *words,
                    stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    env=supervised(),
                )  # fmt: skip
        self._running[kind, number] = process
        return process

    async def _forked(self, kind: str, words: list[str], log: Path) -> Process | None:
        """None where it has to be started with its own command line."""
        if self._forks is None or kind not in self._forks.kinds or self._forks.body != BODY:
            return None
        try:
            return await self._forks.fork(words, log)
        except ForkError as error:
            self._say(f"{words[0]}-{words[2]} is started by itself: {error}")
            return None

    def _log(self, kind: str, number: int) -> Path:
        return self._layout.attempt_logs(self._attempt) / f"{kind}-{number}.log"

    def _last_words(self, kind: str, number: int) -> str:
        lines = self._log(kind, number).read_text(errors="replace").splitlines()
        said = [line for line in lines if line.startswith("rollmill: ")]
        return (said or lines or ["it said nothing"])[-1].removeprefix("rollmill: ")

    async def _bury(self, member: str) -> None:
        """Take away the dead member's file and free its leases at once; without a router they run out by themselves."""
        await asyncio.to_thread(sharedfs.unlink, self._layout.member(member))
        if member.startswith("router-"):
            return
        from stages.http import RouterLink  # HTTP takes a third of a second, and no process waits for it at its start

        with contextlib.suppress(RouterUnreachableError, ServiceError):
            async with RouterLink("worker", run_dir=self._layout.root) as link:
                await link.call("DELETE", f"/v1/members/{member}", answer=bytes, patience_s=10.0)

    async def stop(self) -> None:
        """End all processes: workers hand over first, then the engines, the router last. Kills what does not end."""
        self._ending.update(kind for kinds in ORDER for kind in kinds)
        for kinds in ORDER:
            await self.end(kinds)
        if self._forks is not None:
            await self._forks.aclose()

    async def end(self, kinds: Iterable[str]) -> None:
        """End the processes of these kinds and start none of them again; workers hand over what they hold."""
        kinds = frozenset(kinds)
        self._ending |= kinds
        ending = [(slot, process) for slot, process in self._running.items() if slot[0] in kinds]
        for _, process in ending:
            _ask_to_end(process)
        await asyncio.gather(*(self._end(slot[0], process) for slot, process in ending))

    async def _end(self, kind: str, process: Process) -> None:
        try:
            async with asyncio.timeout(END_S.get(kind, END_WORKER_S)):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _ask_to_end(process: Process) -> None:
    """By SIGINT: SIGTERM is what a batch system sends to all processes at once, and the servers outlast it."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
