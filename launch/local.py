"""placement=local: the whole run on this machine, one process a router, replica and worker, supervised from here."""

from __future__ import annotations

import asyncio
import contextlib

from conf.schema import Config
from launch.bodies import node_scratch
from launch.drive import Driver
from launch.forked import ForkServer
from launch.opening import check_parts, furnish, open_run, show_finished
from launch.supervisor import numbered
from sandbox.choose import choose
from sandbox.scratch import owned
from stages.layout import RunLayout
from stages.manifest import begin_attempt


async def run_local(config: Config) -> int:
    """Run to the end, or resume, or show the result of a run that has ended; returns the exit code."""
    pools = config.pools
    replicas = 0 if config.fleet.name == "external" else config.fleet.replicas
    slots = numbered([
        ("router", 1), ("replica", replicas), ("init", pools.init.workers), ("run", pools.run.workers),
        ("eval", pools.eval.workers),
    ])  # fmt: skip
    async with contextlib.aclosing(ForkServer(kind for kind, _ in slots)) as forks:
        forks.begin()  # it imports while the parts are checked
        layout = RunLayout(config.run_path)
        await check_parts(config)
        with owned(node_scratch(config), "probe-") as scratch:
            async with await choose(config.sandbox.name, scratch):
                pass
        opened = await open_run(config, layout)
        if opened.state == "finished":
            return show_finished(layout)
        await asyncio.to_thread(furnish, layout)
        attempt = await asyncio.to_thread(begin_attempt, layout)
        return int(await Driver(config, layout, attempt, slots, forks=forks).to_the_end())
