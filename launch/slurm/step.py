"""One task of a step: `python -P -m launch.slurm.step RUN_DIR NAME SHARE...`; the driver, or a node's processes."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from launch.errors import Exit
from launch.kinds import IN_JOB, WORKERS, die_with_parent
from launch.slurm.shapes import Share

PATIENCE_S: Final = 20.0
"""How long the router stays for workers that were told to end with it; Slurm's own KillWait may be shorter."""
DRAIN, STOP = "drain", "stop"
"""What the leader says on the standard input of a step."""


def main(argv: Sequence[str]) -> int:
    """Do this node's part of a step to its end; returns the exit code."""
    run_dir, name, shares = Path(argv[0]), argv[1], [Share.parse(word) for word in argv[2:]]
    os.umask(0o077)
    from launch.failures import describe

    die_with_parent()
    try:
        return asyncio.run(_drive(run_dir) if name == "control" else _keep(run_dir, slots_here(shares)))
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # the last boundary of the process: one line, quoted by whoever asks why the job ended
        if os.environ.get("ROLLMILL_DEBUG") == "1":
            raise
        message, code = describe(error)
        sys.stderr.write(f"rollmill: {message}\n")
        return code


def slots_here(shares: Iterable[Share]) -> list[tuple[str, int]]:
    """The processes of this step on this node, by the rank that Slurm gave the task."""
    node = int(os.environ.get("SLURM_PROCID", "0"))
    return [(share.kind, number) for share in shares for number in share.numbers_on(node)]


async def _drive(run_dir: Path) -> int:
    """The control component: the router and the workflow."""
    from launch.supervisor import Supervisor, numbered
    from stages.layout import RunLayout

    layout, attempt = RunLayout(run_dir), _attempt()
    supervisor = Supervisor(layout, numbered([("router", 1)]), attempt, _say)
    supervisor.keep()  # every worker waits for the router: it comes up while the workflow is being imported
    await asyncio.to_thread(importlib.import_module, "launch.drive")

    from conf.load import load_config
    from launch.drive import Driver, Look

    config = load_config(run_dir)
    looks: list[Look] = []
    if config.placement.name in {"linked", "auto"}:
        from launch.slurm.pool_watch import PoolWatch

        looks.append(PoolWatch(config, layout).look)
    if config.pools.run.autoscale.max:
        from launch.slurm.elastic import Autoscaler

        looks.append(Autoscaler(config, layout).look)
    driver = Driver(config, layout, attempt, supervisor, looks, patience_s=PATIENCE_S)
    await hear({DRAIN: driver.drain, STOP: driver.stop})
    return int(await driver.to_the_end())


async def _keep(run_dir: Path, slots: Sequence[tuple[str, int]]) -> int:
    """Keep this node's processes until told to stop.

    A drain ends the workers, which hand over what they hold, and leaves the engines to workers elsewhere that still
    finish a turn. Returns 75 where a drain left nothing to keep, so that a leader that was not told knows.
    """
    from launch.supervisor import Supervisor
    from stages.layout import RunLayout

    supervisor = Supervisor(RunLayout(run_dir), slots, _attempt(), _say)
    stop, drain = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGUSR2, drain.set)
    await hear({DRAIN: drain.set, STOP: stop.set})
    keeping = asyncio.create_task(supervisor.keep_all(), name="keep")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    draining = asyncio.create_task(drain.wait(), name="drain")
    try:
        await asyncio.wait({keeping, stopping, draining}, return_when=asyncio.FIRST_COMPLETED)
        if draining.done() and not stopping.done():
            await supervisor.end(WORKERS)
            await asyncio.wait({keeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            keeping.result()
            return Exit.REQUEUED
    finally:
        await supervisor.stop()
        await asyncio.gather(keeping, return_exceptions=True)
        for task in (stopping, draining):
            task.cancel()
        await asyncio.to_thread(_sweep, run_dir)
    return 0


async def hear(words: Mapping[str, Callable[[], None]]) -> None:
    """Call what belongs to each word that the leader says; when it can say nothing more, it is gone: that is a stop."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def listen() -> None:
        async for line in reader:
            words.get(line.decode(errors="replace").strip(), lambda: None)()
        words[STOP]()

    _listening.add(asyncio.create_task(listen(), name="leader"))


_listening: set[asyncio.Task[None]] = set()
"""Held, since an event loop keeps only weak references to its tasks."""


def _sweep(run_dir: Path) -> None:
    """Take away what processes that were killed on this node could not."""
    from conf.load import load_config
    from launch.bodies import node_scratch
    from sandbox.scratch import sweep

    sweep(node_scratch(load_config(run_dir)))


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _attempt() -> int:
    return int(os.environ.get(IN_JOB, "1"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
