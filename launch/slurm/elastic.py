"""Workers that come and go while a run lives: `rollmill scale` and `pools.run.autoscale` submit and end linked jobs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

from conf.schema import Config
from launch.errors import CommandError, LaunchError
from launch.slurm import record
from launch.slurm.autoscale import Added, Controller, Grow, Shrink, leases_of
from launch.slurm.client import open_client
from launch.slurm.record import Submission
from launch.slurm.shapes import PoolName, Share, added_job, jobs_of
from stages.layout import RunLayout

LOOK_S: Final = 5.0
UNSEEN_S: Final = 600.0
"""How long added workers may be unseen before Slurm is asked whether their job lives, and between two questions."""


async def grow(config: Config, layout: RunLayout, pool: PoolName, workers: int, partition: str | None) -> Submission:
    """Submit a linked job with more workers of a pool, whatever the run's own placement.

    Raises:
        LaunchError: Slurm refused, was not reached, or the run's submissions of this hour are used up.
    """
    from launch.slurm.submit import run_id_of, submit_job

    submissions = await asyncio.to_thread(record.read, layout, forgotten=True)
    first, nth = _next_number(config, submissions, pool), len(added_jobs(submissions, pool)) + 1
    job = added_job(config, pool, workers, first, nth=nth, partition=partition)
    run_id = await asyncio.to_thread(run_id_of, layout)
    return await asyncio.to_thread(
        submit_job,
        config,
        layout,
        run_id,
        job,
        "linked",
        "scale",
        workers=workers,
        first=first,
        code=_code(submissions),
    )


def _code(submissions: list[Submission]) -> str:
    """What the run was submitted with: added workers are of one code with the others, or say that they are not."""
    return next((one.code for one in reversed(submissions) if one.control), "")


async def shrink(layout: RunLayout, ending: list[Submission]) -> None:
    """End added jobs; their workers hand over what they hold within Slurm's own grace (KillWait)."""
    for clusters, ids in record.by_clusters(ending).items():
        await open_client(clusters).cancel(ids)
    for one in ending:
        await asyncio.to_thread(record.forget, layout, one)


def added_jobs(submissions: list[Submission], pool: str) -> list[Submission]:
    """The submissions that added workers to a pool, oldest first."""
    return [one for one in submissions if one.workers and one.components == [pool]]


def _next_number(config: Config, submissions: list[Submission], pool: PoolName) -> int:
    """A worker number of the pool that the run has never used."""
    placements = [one.placement for one in submissions if one.control] or ["linked"]
    own: list[int] = []
    for job in jobs_of(config, placements[-1]):  # type: ignore[arg-type]
        shares = [Share.parse(word) for step in job.steps for word in step.argv[3:]]
        own += [share.last for share in shares if share.kind == pool]
    return 1 + max([*own, *(one.first + one.workers - 1 for one in added_jobs(submissions, pool))], default=0)


async def scale(config: Config, layout: RunLayout, pool: PoolName, change: int) -> str:
    """Add workers to a pool, or end added jobs with about as many, the newest first; says what was done.

    Raises:
        CommandError: nothing was added that could be ended.
        LaunchError: Slurm refused or was not reached.
    """
    if change > 0:
        made = await grow(config, layout, pool, change, None)
        return f"{change} more {pool} workers asked for: job {made.job_id}, script {made.script}"
    added = added_jobs(await asyncio.to_thread(record.read, layout), pool)
    if not added:
        raise CommandError(f"pools.{pool}: no worker of it was added, and the run's own stay to its end")
    ending: list[Submission] = []
    while added and sum(one.workers for one in ending) < -change:
        ending.append(added.pop())
    await shrink(layout, ending)
    return f"{sum(one.workers for one in ending)} added {pool} workers end: job " + ", ".join(o.job_id for o in ending)


class Autoscaler:
    """Looks at the run every few seconds from its driver, and acts on what the controller decides.

    Args:
        config: the run's.
        layout: its run directory.
    """

    def __init__(self, config: Config, layout: RunLayout) -> None:
        self._config, self._layout = config, layout
        keys = config.pools.run
        self._controller = Controller(keys.autoscale, max(1, keys.workers))
        self._looked = 0.0
        self._came: set[str] = set()
        self._asked: dict[str, float] = {}

    async def look(self, status: Mapping[str, Any]) -> None:
        """Act at most once; what Slurm refuses is said and tried again later."""
        now = time.monotonic()
        if now - self._looked < LOOK_S or status.get("state") != "running":
            return
        self._looked = now
        try:
            submissions = await asyncio.to_thread(record.read, self._layout, forgotten=True)
            there = [one for one in added_jobs(submissions, "run") if not one.forgotten]
            numbers = set(leases_of(status))
            there = await self._without_dead(now, there, numbers)
            added = [
                Added(one.job_id, one.first, one.workers, _is_late(one) and bool(numbers & _numbers(one)))
                for one in there
            ]
            left = self._config.cluster.max_submissions_per_hour - record.in_last_hour(submissions)
            decided = self._controller.decide(now, status, added, left)
            if isinstance(decided, Grow):
                partition = self._config.pools.run.autoscale.partition
                made = await grow(self._config, self._layout, "run", decided.workers, partition)
                _say(f"{decided.workers} more RUN workers asked for: job {made.job_id}")
            elif isinstance(decided, Shrink):
                await shrink(self._layout, [one for one in there if one.job_id == decided.job_id])
                _say(f"the added RUN workers of job {decided.job_id} were idle: ended")
        except (LaunchError, OSError) as error:
            _say(f"the RUN pool stays as it is: {error}")

    async def _without_dead(self, now: float, there: list[Submission], numbers: set[int]) -> list[Submission]:
        """The added jobs that may still bring workers: where some are missing Slurm is asked, and a dead job forgotten.

        Missing are workers that did not come within minutes, or came and left while others stay.
        """
        doubtful: list[Submission] = []
        for one in there:
            if numbers & _numbers(one):
                self._came.add(one.job_id)
                continue
            missing = bool(numbers) if one.job_id in self._came else _is_late(one)
            if missing and now - self._asked.get(one.job_id, -UNSEEN_S) >= UNSEEN_S:
                self._asked[one.job_id] = now
                doubtful.append(one)
        dead: set[str] = set()
        for clusters, ids in record.by_clusters(doubtful).items():
            since = min(one.submitted_at for one in doubtful)
            jobs = await open_client(clusters).jobs(ids, since=since)
            dead |= set(ids) - {job.leader_id for job in jobs if not job.state.ended}
        for one in doubtful:
            if one.job_id in dead:
                await asyncio.to_thread(record.forget, self._layout, one)
                _say(f"added job {one.job_id} has ended: its {one.workers} RUN workers do not count any more")
        return [one for one in there if one.job_id not in dead]


def _numbers(one: Submission) -> set[int]:
    return set(range(one.first, one.first + one.workers))


def _is_late(one: Submission) -> bool:
    return time.time() - one.submitted_at > UNSEEN_S


def _say(text: str) -> None:
    sys.stderr.write(f"rollmill: {text}\n")
