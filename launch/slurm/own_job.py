"""The record of the job that this process runs in: found by the job's name, or made where its submitter died before."""

from __future__ import annotations

import os
import time

import msgspec

from conf.schema import Config
from launch.slurm import record
from launch.slurm.code import code_digest
from launch.slurm.record import Submission
from launch.slurm.shapes import jobs_of
from stages.layout import RunLayout


def own_submission(config: Config, layout: RunLayout, job: str, job_id: str) -> Submission:
    """This job's record, with the cluster that it runs in; made here where there is none. Blocking.

    The record is opened by the job's name first: a network filesystem may not list yet what another node has made.

    Args:
        config: the run's.
        layout: its run directory.
        job: which job of the placement this is.
        job_id: Slurm's id; of a heterogeneous job its leader's.
    """
    mine = record.find(layout, os.environ.get("SLURM_JOB_NAME", ""))
    if mine is None or mine.job_id != job_id:
        submissions = record.read(layout, forgotten=True)
        mine = next((one for one in reversed(submissions) if one.job_id == job_id), None)
    if mine is None:
        mine = record.add_new(layout, _note(config, job, job_id))
    if mine.job_id != job_id:  # its name's other job is the run: whoever submitted twice takes this one away
        mine = msgspec.structs.replace(mine, job_id=job_id, forgotten=True)
    return msgspec.structs.replace(mine, clusters=record.here(mine.clusters))


def _note(config: Config, job: str, job_id: str) -> Submission:
    name = config.placement.name
    placement = {"het": "het", "colocated": "colocated"}.get(job, "linked") if name == "auto" else name
    jobs = [one for one in jobs_of(config, placement) if one.name == job]  # type: ignore[arg-type]
    return Submission(
        name=os.environ.get("SLURM_JOB_NAME", job_id),
        job=job,
        job_id=job_id,
        placement=placement,
        components=[component.name for one in jobs for component in one.components] or [job.partition("+")[0]],
        clusters=record.here(config.cluster.clusters),
        submitted_at=time.time(),
        workers=0 if jobs else 1,
        control=any(step.name == "control" for one in jobs for step in one.steps),
        code=code_digest(),
    )
