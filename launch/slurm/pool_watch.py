"""Linked jobs come and go apart: whether a pool that is not there will still come is asked of Slurm, rarely."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

from conf.schema import Config
from launch.slurm import record
from launch.slurm.client import open_client
from launch.slurm.client.errors import SlurmError
from launch.slurm.client.protocol import SlurmClient
from stages import control
from stages.layout import RunLayout

ASK_S: Final = 300.0
"""Between two questions: a pool may wait in the queue for hours."""


class PoolWatch:
    """Looks at a linked run from its driver, and fails it when a component that it needs has ended for good.

    Args:
        config: the run's.
        layout: its run directory.
        client: of Slurm; None: by the config's clusters.
    """

    def __init__(self, config: Config, layout: RunLayout, client: SlurmClient | None = None) -> None:
        self._config, self._layout = config, layout
        self._client = client if client is not None else open_client(config.cluster.clusters)
        self._missing_since: dict[str, float] = {}
        self._asked = float("-inf")

    async def look(self, status: Mapping[str, Any]) -> None:
        """Ask at most once in five minutes, and only about what was missing for `stuck_after_s`."""
        now = time.monotonic()
        there = {str(member.get("kind")) for member in status["members"]}
        if any(replica.get("state") == "ready" for replica in status["fleet"]) or self._config.fleet.name == "external":
            there.add("fleet")
        for component in ("init", "run", "eval", "fleet"):
            if component in there:
                self._missing_since.pop(component, None)
            else:
                self._missing_since.setdefault(component, now)
        long = [name for name, since in self._missing_since.items() if now - since >= self._config.stuck_after_s]
        if long and status["rollouts"]["open"] and now - self._asked >= ASK_S:
            self._asked = now
            await self._ask(long)

    async def _ask(self, components: list[str]) -> None:
        submissions = record.current(await asyncio.to_thread(record.read, self._layout))
        ids = {one.job_id: one.job for one in submissions if one.job in components}
        if not ids:
            return
        try:
            jobs = await self._client.jobs(list(ids), since=min(one.submitted_at for one in submissions))
        except SlurmError:
            return  # it may answer the next time
        for job in jobs:
            if job.state.ended and job.leader_id in ids:
                message = f"component {ids[job.leader_id]} will not come: its job {job.job_id} is {job.state.value}"
                await asyncio.to_thread(control.request, self._layout.root, "fail", message)
                return
