"""How a run's submissions stand in Slurm before another is made: which of them live, and halves that have to go."""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema import Config
from launch.slurm import record
from launch.slurm.client import open_client
from launch.slurm.client.protocol import JobInfo
from launch.slurm.record import Submission


async def live_jobs(config: Config, submissions: Sequence[Submission]) -> list[JobInfo]:
    """The jobs of the newest submissions that have not ended; one question to Slurm.

    Raises:
        SlurmError: it did not answer, so that nothing can be said.
    """
    ids = [one.job_id for one in record.current(list(submissions))]
    since = min(one.submitted_at for one in submissions)
    return [job for job in await open_client(config.cluster.clusters).jobs(ids, since=since) if not job.state.ended]


def halves(submissions: Sequence[Submission], live: Sequence[JobInfo]) -> list[str]:
    """Leader ids of heterogeneous jobs of which some components live and some do not: they will never work again."""
    return [
        one.job_id
        for one in record.current(list(submissions))
        if len(one.components) > 1 and 0 < sum(job.leader_id == one.job_id for job in live) < len(one.components)
    ]


async def end_halves(config: Config, submissions: Sequence[Submission], live: Sequence[JobInfo]) -> bool:
    """Cancel half-dead heterogeneous jobs; True where nothing else of the run lives."""
    broken = halves(submissions, live)
    if broken:
        await open_client(config.cluster.clusters).cancel(broken)
    return {job.leader_id for job in live} == set(broken)
