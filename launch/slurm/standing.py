"""How a run's submissions stand in Slurm before another is made: which of them live, and halves that have to go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from conf.schema import Config
from launch.slurm import record
from launch.slurm.client import open_client
from launch.slurm.client.protocol import JobInfo
from launch.slurm.client.verdict import half_dead
from launch.slurm.record import Submission
from stages.layout import RunLayout


async def live_jobs(config: Config, submissions: Sequence[Submission]) -> list[JobInfo]:
    """The jobs of the newest submissions that have not ended, after halves of heterogeneous ones were ended.

    One question to each cluster that has some of them: to one, as a rule.

    Raises:
        SlurmError: it did not answer, so that nothing can be said.
    """
    live: list[JobInfo] = []
    since = min(one.submitted_at for one in submissions)
    for clusters, ids in record.by_clusters(record.current(list(submissions))).items():
        client = open_client(clusters)
        jobs = await client.jobs(ids, since=since)
        broken = half_dead(jobs)
        if broken:  # it will never work again, and its nodes are taken meanwhile
            await client.cancel(broken)
        live += [job for job in jobs if not job.state.ended and job.leader_id not in broken]
    return live


def carry_on(submissions: Sequence[Submission], live: Sequence[JobInfo]) -> bool:
    """Whether one of these jobs may hold the router: workers and engines alone carry no run on."""
    control = {one.job_id for one in record.current(list(submissions)) if one.control}
    return any(job.leader_id in control for job in live)


async def end_leftovers(layout: RunLayout, submissions: Sequence[Submission], live: Sequence[JobInfo]) -> list[str]:
    """Cancel the jobs of workers and engines whose router is gone for good, and return their ids.

    Raises:
        SlurmError: it did not take it: two of a kind would share names and numbers.
    """
    left = {job.leader_id for job in live}
    going = [one for one in record.current(list(submissions)) if one.job_id in left]
    for clusters, ids in record.by_clusters(going).items():
        await open_client(clusters).cancel(ids)
    for one in going:
        if one.workers:  # the run that is carried on begins without what was added
            await asyncio.to_thread(record.forget, layout, one)
    return [one.job_id for one in going]
