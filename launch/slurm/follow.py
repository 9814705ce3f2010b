"""action=run on a cluster: shows a submitted run until it ends, asking its router or files, and Slurm rarely."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import Any, Final

from launch.errors import Exit, LaunchError
from launch.progress import Progress, print_summary
from launch.slurm.watch import RunWatch
from stages.layout import RunLayout
from stages.summary import read_summary, summary_state

LOOK_S: Final = 2.0
ENDED: Final = frozenset({"completed", "failed", "cancelled"})


class RunFailedError(LaunchError):
    """The run has ended and will not go on by itself."""


class RunAbandonedError(RunFailedError):
    """The run was to go on, and no job is left that would do so."""

    exit_code = Exit.REQUEUED


async def follow(watch: RunWatch, layout: RunLayout, visibility_s: float = 60.0) -> int:
    """Show progress until the run ends; returns its exit code. Ctrl-C leaves the jobs alone.

    `visibility_s` are the seconds that the record of a job submitted elsewhere may take to be seen here: so long a run
    that was to go on may look abandoned.

    Raises:
        RunFailedError: it failed; the first error is quoted.
        RunAbandonedError: it was to go on, and nothing carries it on.
    """
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    status: dict[str, Any] = {}
    abandoned_since: float | None = None
    with Progress(layout.root) as progress:
        while True:
            status = await watch.status()
            if (state := await asyncio.to_thread(summary_state, layout)) in ENDED:
                status = {**status, "state": state}
            progress.update(status)
            abandoned = state == "requeued" and status["state"] == "failed"
            if not abandoned:
                abandoned_since = None
                if status["state"] in ENDED:
                    break
            else:
                abandoned_since = time.monotonic() if abandoned_since is None else abandoned_since
                if time.monotonic() - abandoned_since >= visibility_s:
                    raise RunAbandonedError(f"{layout.root}: {status['stuck']}")
            if stop.is_set():
                progress.say(f"the jobs go on; `rollmill status {layout.root}` shows them, `rollmill cancel` ends them")
                return Exit.INTERRUPTED
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await stop.wait()
    return await asyncio.to_thread(_result, layout, status)


def _result(layout: RunLayout, status: dict[str, Any]) -> int:
    left = read_summary(layout)
    if left is not None:
        print_summary(left, layout.root)
    summary = left if left is not None else status
    if status["state"] == "failed":
        why = summary.get("error") or summary.get("stuck") or status.get("stuck")
        raise RunFailedError(f"{layout.root}: {why or 'the run failed; `rollmill logs` has what it said'}")
    return Exit.DONE if status["state"] == "completed" else Exit.INTERRUPTED
