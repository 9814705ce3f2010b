"""Cancelling a run's jobs: the run is asked by file to end in order; what does not end so is taken by Slurm."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

from launch.errors import LaunchError
from launch.slurm import record
from launch.slurm.client import open_client
from launch.slurm.client.errors import SlurmError
from launch.slurm.client.protocol import JobInfo
from launch.slurm.record import Submission
from stages.layout import RunLayout
from stages.status import read_status
from stages.summary import summary_state, write_summary

IN_ORDER_S: Final = 45.0
"""What a run is given to end by itself: it knows within a second, and its sandboxes stop within a few."""
LOOK_S: Final = 0.5


class NotCancelledError(LaunchError):
    """Slurm did not take the cancellation: jobs may still wait or run."""


async def cancel_jobs(run_dir: Path, *, wait: bool = True) -> list[str]:
    """End every job of the run whose cancellation has been requested; says what was done. A local run has none.

    Raises:
        NotCancelledError: Slurm did not take it.
    """
    layout = RunLayout(run_dir)
    # All that were made: one that a successor stands for may run on without its batch shell, and hear of nothing.
    submissions = await asyncio.to_thread(record.read, layout)
    if not submissions or _ended(layout):
        return []
    places = record.by_clusters(submissions)
    since = min(one.submitted_at for one in submissions)
    try:
        jobs = [job for clusters, ids in places.items() for job in await open_client(clusters).jobs(ids, since=since)]
        live = [job for job in jobs if not job.state.ended]
        in_order = _router_runs(submissions, live)
        if in_order and wait:
            await _until_ended(layout)
        elif in_order:
            return ["its jobs end in a moment"]
        ended = {job.leader_id for job in jobs} - {job.leader_id for job in live}
        current = record.current(submissions)
        ours = [one for one in submissions if one in current or one.job_id not in ended]
        if live:
            for clusters, ids in record.by_clusters(ours).items():
                await open_client(clusters).cancel(ids)
    except SlurmError as error:
        # A router that runs was asked by file and needs no Slurm for that: from a node without its network it ends too.
        if wait and layout.router_json.exists():
            await _until_ended(layout)
        if _ended(layout):
            return []
        raise NotCancelledError(
            f"{run_dir}: Slurm did not take it: {error}; the run itself was asked by file, and what waits in the "
            "queue stays there: `rollmill cancel` again when `sinfo` answers"
        ) from error
    if not _ended(layout):
        await asyncio.to_thread(_leave_summary, layout)
    return [f"jobs {', '.join(one.job_id for one in ours)} are cancelled"]


def _router_runs(submissions: list[Submission], live: list[JobInfo]) -> bool:
    control = {one.job_id for one in submissions if one.control}
    return any(job.leader_id in control and job.state.holds_nodes for job in live)


async def _until_ended(layout: RunLayout) -> None:
    until = time.monotonic() + IN_ORDER_S
    while time.monotonic() < until:
        if await asyncio.to_thread(_ended, layout):
            return
        await asyncio.sleep(LOOK_S)


def _ended(layout: RunLayout) -> bool:
    return summary_state(layout) in {"completed", "cancelled"}


def _leave_summary(layout: RunLayout) -> None:
    """The result of a run whose driver cannot write it any more, or never began."""
    write_summary(layout, {**read_status(layout), "state": "cancelled", "members": [], "stuck": None})
