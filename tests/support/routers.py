"""A real router over HTTP in the test's own loop, a toy task, and a worker played by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from stages import beacon, sharedfs
from stages.http import RouterLink
from stages.layout import RunLayout
from stages.ledger.events import Rules
from stages.protocols import Environment, Row
from stages.router.auth import make_secrets
from stages.router.leasing import Budgets
from stages.router.served import ServedTask
from stages.router.service import RouterOptions, serve
from stages.trajectory import Sampling
from tests.support.waiting import eventually


class ToyTask:
    """Rows `toy-0`.. with a private answer; a row's `env` names its environment."""

    name = "toy"
    private = frozenset({"answer"})

    def __init__(self, count: int = 100) -> None:
        self._count = count

    def rows(self) -> Iterable[Row]:
        return ({"task_id": f"toy-{i}", "question": f"{i} + 1", "answer": i + 1} for i in range(self._count))

    def environment(self, row: Row) -> Environment:
        if row.get("question") == "explode":
            raise ValueError("no such thing")
        return Environment(setup_key=str(row.get("env", "")))


def make_run(root: Path) -> RunLayout:
    """An empty run directory with its secrets."""
    layout = RunLayout(root)
    for directory in layout.directories:
        sharedfs.make_dirs(directory)
    make_secrets(layout)
    return layout


def options(**changes: Any) -> RouterOptions:
    """Options for a quick test."""
    rules = changes.pop("rules", Rules(lease_ttl_s=5.0))
    given = {"run_id": "toy-run", "member": "router-1-test", "max_open": 1000, **changes}
    return RouterOptions(rules=rules, sampling=Sampling(), budgets=Budgets(60, 60, 60), **given)


@contextlib.asynccontextmanager
async def routed(layout: RunLayout, **changes: Any) -> AsyncIterator[RouterLink]:
    """A serving router, of the toy task where no `task` is given; gives a worker's link to it."""
    task = changes.pop("task", None) or ToyTask()
    served = ServedTask(task, lambda image: "sha256:0", privileged_agent=changes.pop("privileged", False))
    stop = asyncio.Event()
    before = beacon.read(layout)
    serving = asyncio.create_task(serve(layout, served, options(**changes), stop))

    async def is_up() -> bool:
        if serving.done():
            serving.result()
        now = beacon.read(layout)
        return now is not None and not now.ended and (before is None or now.epoch > before.epoch)

    try:
        await eventually(is_up, "the router publishes itself")
        async with RouterLink("worker", run_dir=layout.root, patience_s=10) as link:
            await link.locate()
            yield link
    finally:
        stop.set()
        await serving


class HandWorker:
    """Calls a worker's routes one by one."""

    def __init__(self, link: RouterLink, member: str) -> None:
        self._link, self.member = link, member

    async def lease(self, stage: str, free: int = 100, wait_s: float = 0.0) -> list[dict[str, Any]]:
        body = {"member": self.member, "epoch": self._link.epoch, "stage": stage, "free": free, "wait_s": wait_s}
        return (await self._link.call("POST", "/v1/lease", body, answer=dict[str, Any]))["leases"]

    async def heartbeat(self, leases: list[str]) -> dict[str, Any]:
        body = {"member": self.member, "epoch": self._link.epoch, "leases": leases}
        return await self._link.call("POST", "/v1/heartbeat", body, answer=dict[str, Any])

    async def commit(self, lease: dict[str, Any], outcome: str = "ok", **fields: Any) -> str:
        given: dict[str, Any] = {
            "init": {"layer": "sha256:" + "1" * 64},
            "run": {"segment": {"path": "handoff/x-0.seg", "offset": 0, "length": 8, "crc32": 1}},
            "eval": {"row": {"path": "shards/x-0.arrows", "offset": 0, "length": 8, "crc32": 1, "reward": 1.0}},
        }[lease["stage"]]
        commit = {k: lease[k] for k in ("lease_id", "rollout_id", "attempt")} | {"outcome": outcome} | given | fields
        body = {"member": self.member, "epoch": self._link.epoch, "commits": [commit]}
        return (await self._link.call("POST", "/v1/commit", body, answer=dict[str, Any]))["results"][0]["status"]

    async def through(self, stage: str) -> list[str]:
        return [await self.commit(lease) for lease in await self.lease(stage)]
