"""Whether the run that a job serves is over: told by its files, or by Slurm when the router has fallen silent."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Final

import msgspec

from conf.schema import Config
from launch.kinds import ORPHAN_TTLS
from launch.slurm import record
from launch.slurm.client import open_client
from launch.slurm.client.errors import SlurmError
from launch.slurm.client.protocol import JobInfo
from stages import beacon
from stages.beacon import Beacon
from stages.errors import StageError
from stages.layout import RunLayout
from stages.summary import summary_state

LOOK_S: Final = 2.0
ASK_S: Final = 60.0
"""Between two questions to Slurm about the router's job, less a jitter: jobs of one run do not ask in step."""
ASK_MAX_S: Final = 300.0
"""What that pause grows to while the answer stays the same, and how long a router may take to come at all."""
GROWTH: Final = 1.5
OVER: Final = frozenset({"completed", "failed", "cancelled"})


async def run_is_over(config: Config, layout: RunLayout) -> str:
    """Return when nothing is left to do for workers and engines, and why.

    One small file is read again and again, router.json. Where it says that the router left in order, the summary says
    whether the run goes on; where its beat stands still, Slurm is asked about the job that held it, ever more rarely.
    A summary from before this job was submitted is that of an attempt which was carried on since: a network filesystem
    may show it for a while. It counts where it stays.
    """
    begun = await asyncio.to_thread(_submitted_at, layout)
    still_since, last = time.monotonic(), None
    asked, pause_s = time.monotonic(), ASK_S
    stale_since: float | None = None
    while True:
        found = await asyncio.to_thread(_beacon, layout)
        if found is None or found.ended:
            state, written_at = await asyncio.to_thread(_summary, layout)
            if state not in OVER:
                stale_since = None
            else:
                stale_since = time.monotonic() if stale_since is None else stale_since
                if written_at >= begun or time.monotonic() - stale_since >= 2 * config.fs.visibility_s:
                    return f"the run {state}"
        else:
            stale_since = None
        if found is not None and (found.epoch, found.beat) != last:
            still_since, last, pause_s = time.monotonic(), (found.epoch, found.beat), ASK_S
        silent_s, patience_s = time.monotonic() - still_since, ORPHAN_TTLS * config.lease.ttl_s
        if last is None:
            patience_s = max(patience_s, ASK_MAX_S)
        if silent_s > patience_s and time.monotonic() - asked > pause_s * random.uniform(0.8, 1):  # noqa: S311
            asked, pause_s = time.monotonic(), min(ASK_MAX_S, pause_s * GROWTH)
            ended = await _control_has_ended(layout)
            if ended:
                return ended
        await asyncio.sleep(LOOK_S)


def _beacon(layout: RunLayout) -> Beacon | None:
    """None also where the file cannot be read: it is looked at again, and meanwhile the router counts as silent."""
    try:
        return beacon.read(layout)
    except (OSError, StageError):
        return None


def _summary(layout: RunLayout) -> tuple[str, float]:
    """The state in the summary and when that was written (unix seconds); empty where there is none."""
    try:
        written_at = layout.summary.stat().st_mtime
        return summary_state(layout), written_at
    except (OSError, msgspec.MsgspecError):
        return "", 0.0


def _submitted_at(layout: RunLayout) -> float:
    """When this job was submitted (unix seconds); 0 where no record says so."""
    mine = os.environ.get("SLURM_HET_JOB_ID") or os.environ.get("SLURM_JOB_ID")
    try:
        return max((one.submitted_at for one in record.read(layout) if one.job_id == mine), default=0.0)
    except (OSError, msgspec.MsgspecError):
        return 0.0


async def _control_has_ended(layout: RunLayout) -> str:
    """Why the router will not come back, or nothing: also where Slurm does not answer, for it may answer later."""
    submissions = await asyncio.to_thread(record.read, layout)
    control = [one for one in record.current(submissions) if one.control]
    ids = [one.job_id for one in control]
    if not ids:
        return ""
    since = min(one.submitted_at for one in control)
    jobs: list[JobInfo] = []
    try:
        for clusters, some in record.by_clusters(control).items():
            jobs += await open_client(clusters).jobs(some, since=since)
    except SlurmError:
        return ""
    if not jobs:  # the controller knows every job that waits or runs
        return f"Slurm does not know the router's job {ids[-1]} any more"
    ended = [job for job in jobs if job.state.ended]
    return f"the router's job {ids[-1]} is {ended[-1].state.value}" if len(ended) == len(jobs) else ""
