"""A small run told by hand to real router processes that may die, with what was acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from stages import beacon
from stages.client import AsyncRolloutClient
from stages.errors import RouterUnreachableError, ServiceError
from stages.http import RouterLink
from stages.layout import RunLayout
from tests.support import runs
from tests.support.crashes import Crash, route_until_killed
from tests.support.routers import HandWorker
from tests.support.waiting import eventually

T = TypeVar("T")


def forks() -> ForkServerContext:
    """Processes that start in milliseconds: all modules are loaded once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.crashes"])
    return context


class RouterProcess:
    """A router in a process of its own; `options` are those of tests.support.routers.options."""

    def __init__(self, layout: RunLayout, crash: Crash | None = None, **options: Any) -> None:
        context = forks()
        self.process: BaseProcess = context.Process(
            target=route_until_killed, args=(layout.root, crash, options), daemon=True
        )
        self.process.start()
        self.pid: int = self.process.pid or 0
        self._layout = layout

    @property
    def ended(self) -> bool:
        """Whether it is gone; a dead one is reaped by asking."""
        return not self.process.is_alive()

    def send(self, number: signal.Signals) -> None:
        """A signal, if it still lives."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def serving(self) -> None:
        """Wait until router.json names this very process: only then does it hear signals."""

        def named() -> bool:
            found = beacon.read(self._layout)
            return found is not None and found.pid == self.pid

        await eventually(named, "the router publishes itself")

    async def stop(self, timeout_s: float = 60.0) -> None:
        """SIGTERM, and SIGCONT for one that was stopped, and wait."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            await eventually(lambda: self.ended, "the router ends", timeout_s)
        finally:
            self.process.kill()
            self.process.join()


class Story:
    """What a trainer and a worker did and what they were told: the measure for what may not be lost."""

    def __init__(self, layout: RunLayout, link: RouterLink, trainer: AsyncRolloutClient) -> None:
        self._layout, self.link, self.trainer = layout, link, trainer
        self._worker = HandWorker(link, "w-1-a")
        self._numbers = iter(range(8, 1 << 30, 8))
        self.accepted: list[str] = []
        self.ran: set[str] = set()
        self.graded: dict[str, int] = {}
        self.statuses: list[str] = []

    async def tell(self, tasks: int = 2, group_size: int = 2) -> None:
        """From the submission to the last published line, whatever happens to the routers meanwhile."""
        ask = [{"task_id": f"toy-{number}"} for number in range(tasks)]
        groups = await self.trainer.submit(ask, group_size=group_size, idempotency_key="story")
        again = await self.trainer.submit(ask, group_size=group_size, idempotency_key="story")
        assert groups == again, "one key was accepted twice"
        self.accepted = [name for group in groups for name in group["rollout_ids"]]
        seen: list[int] = []
        while len(seen) < len(self.accepted) + tasks:
            for stage in ("init", "run", "eval"):
                for lease in await self._patiently(lambda stage=stage: self._worker.lease(stage)):
                    await self._finish(lease)
            lines, _ = await self.trainer.results(max(seen, default=0), rows=True, wait_s=0.2)
            seen += [line["seq"] for line in lines]
        assert seen == list(range(1, len(seen) + 1))

    async def _finish(self, lease: dict[str, Any]) -> None:
        name, stage, number = lease["rollout_id"], lease["stage"], next(self._numbers)
        assert stage != "run" or name not in self.ran, f"the acknowledged RUN of {name} was lost"
        assert stage == "init" or name not in self.graded, f"the acknowledged EVAL of {name} was lost"
        changes: dict[str, Any] = {}
        if stage == "eval":
            row = {"path": "shards/x-0.arrows", "offset": number, "length": 8, "crc32": 1, "reward": 1.0, "chains": 1}
            changes = {"row": row}
        status = await self._patiently(lambda: self._worker.commit(lease, **changes))
        self.statuses.append(status)
        if status in {"ok", "already"} and stage == "run":
            self.ran.add(name)
        elif status in {"ok", "already"} and stage == "eval":
            self.graded[name] = number

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await call()
            except ServiceError as error:
                if error.code != "stale_epoch":
                    raise
                with contextlib.suppress(RouterUnreachableError):
                    await self.link.on_stale_epoch()
                    await self.link.locate()  # the next body needs the epoch before it is sent

    def check(self) -> None:
        """What was acknowledged is what the files say, once."""
        rows = runs.rows(self._layout.root)
        assert sorted(row["rollout_id"] for row in rows) == sorted(self.accepted)
        offsets = {row["rollout_id"]: row["offset"] for row in rows}
        assert self.graded.items() <= offsets.items(), "an acknowledged row is not the one in the index"
        runs.exactly_once(self._layout.root, len(self.accepted))
        assert runs.published(self._layout.root) == runs.index(self._layout.root)


@contextlib.asynccontextmanager
async def story(layout: RunLayout, *, patience_s: float = 20.0) -> AsyncIterator[Story]:
    """A story with its own connections."""
    async with (
        RouterLink("worker", run_dir=layout.root, patience_s=patience_s) as link,
        AsyncRolloutClient(layout.root, patience_s=patience_s) as trainer,
    ):

        async def is_up() -> bool:
            found = await asyncio.to_thread(beacon.read, layout)
            return found is not None and not found.ended

        await eventually(is_up, "a router publishes itself")
        await link.locate()
        yield Story(layout, link, trainer)
