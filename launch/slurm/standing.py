"""How a run's submissions stand in Slurm before another is made: which of them live, and halves that have to go."""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema import Config
from launch.slurm import record
from launch.slurm.client import open_client
from launch.slurm.client.protocol import JobInfo
from launch.slurm.client.verdict import half_dead
from launch.slurm.record import Submission


async def live_jobs(config: Config, submissions: Sequence[Submission]) -> list[JobInfo]:
    """The jobs of the newest submissions that have not ended, after halves of heterogeneous ones were ended.

    One question to Slurm.

    Raises:
        SlurmError: it did not answer, so that nothing can be said.
    """
    client = open_client(config.cluster.clusters)
    ids = [one.job_id for one in record.current(list(submissions))]
    jobs = await client.jobs(ids, since=min(one.submitted_at for one in submissions))
    broken = half_dead(jobs)
    if broken:  # it will never work again, and its nodes are taken meanwhile
        await client.cancel(broken)
    return [job for job in jobs if not job.state.ended and job.leader_id not in broken]
