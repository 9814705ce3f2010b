"""Whether the run that a job serves is over: told by its files, or by Slurm when the router has fallen silent."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Final

import msgspec

from conf.schema import Config
from launch.bodies import ORPHAN_TTLS
from launch.slurm import record
from launch.slurm.client import open_client
from launch.slurm.client.errors import SlurmError
from stages import beacon, sharedfs
from stages.beacon import Beacon
from stages.errors import StageError
from stages.layout import RunLayout

LOOK_S: Final = 2.0
ASK_S: Final = 60.0
"""Between two questions to Slurm about the router's job, less a jitter: jobs of one run do not ask in step."""
OVER: Final = frozenset({"completed", "failed", "cancelled"})


async def run_is_over(config: Config, layout: RunLayout) -> str:
    """Return when nothing is left to do for workers and engines, and why.

    One small file is read again and again, router.json. Where it says that the router left in order, the summary says
    whether the run goes on; where its beat stands still, Slurm is asked about the job that held it, rarely.
    """
    still_since, last = time.monotonic(), None
    asked = time.monotonic()
    while True:
        found = await asyncio.to_thread(_beacon, layout)
        if found is None or found.ended:
            state = await asyncio.to_thread(_summary_state, layout)
            if state in OVER:
                return f"the run {state}"
        if found is not None and (found.epoch, found.beat) != last:
            still_since, last = time.monotonic(), (found.epoch, found.beat)
        silent_s = time.monotonic() - still_since
        if silent_s > ORPHAN_TTLS * config.lease.ttl_s and time.monotonic() - asked > ASK_S * random.uniform(0.8, 1):  # noqa: S311
            asked = time.monotonic()
            ended = await _control_has_ended(config, layout)
            if ended:
                return ended
        await asyncio.sleep(LOOK_S)


def _beacon(layout: RunLayout) -> Beacon | None:
    """None also where the file cannot be read: it is looked at again, and meanwhile the router counts as silent."""
    try:
        return beacon.read(layout)
    except (OSError, StageError):
        return None


def _summary_state(layout: RunLayout) -> str:
    try:
        return str(msgspec.json.decode(sharedfs.read_bytes(layout.summary)).get("state", ""))
    except (OSError, msgspec.MsgspecError):
        return ""


async def _control_has_ended(config: Config, layout: RunLayout) -> str:
    """Why the router will not come back, or nothing: also where Slurm does not answer, for it may answer later."""
    submissions = await asyncio.to_thread(record.read, layout)
    ids = [one.job_id for one in record.current(submissions) if one.control]
    if not ids:
        return ""
    try:
        jobs = await open_client(config.cluster.clusters).jobs(ids)
    except SlurmError:
        return ""
    if not jobs:  # the controller knows every job that waits or runs
        return f"Slurm does not know the router's job {ids[-1]} any more"
    ended = [job for job in jobs if job.state.ended]
    return f"the router's job {ids[-1]} is {ended[-1].state.value}" if len(ended) == len(jobs) else ""
