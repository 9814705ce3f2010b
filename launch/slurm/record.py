"""The submissions of a run, one file each below slurm/: what was asked of Slurm, when, and under which job id."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from stages import sharedfs
from stages.layout import RunLayout


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted submission.

    Args:
        name: the unique Slurm job name.
        job: which job of the placement: "het", "colocated", or a component's name; added workers are "run+1" and so on.
        job_id: Slurm's id; of a heterogeneous job its leader's.
        placement: het, linked or colocated.
        components: names of the components, in the order of their offsets.
        clusters: where it was submitted on a multi-cluster site.
        submitted_at: unix seconds.
        script: the batch script, relative to the run directory.
        reason: "launch", "resume", "continue", "scale" or "fallback".
        first: number of the first worker process that it starts; added jobs go on counting where the others end.
        workers: processes that an added job brings; 0 for a placement's own.
        control: whether the router and the workflow run in it.
        code: digest of the code that a person submitted it with (launch.slurm.code); "" where that is not known.
        forgotten: whether it counts for the bound an hour alone: its job was cancelled in favour of others.
    """

    name: str
    job: str
    job_id: str
    placement: str
    components: list[str]
    clusters: list[str] = []
    submitted_at: float = 0.0
    script: str = ""
    reason: str = "launch"
    first: int = 1
    workers: int = 0
    control: bool = False
    code: str = ""
    forgotten: bool = False


def path(layout: RunLayout, name: str) -> Path:
    """The record of one submission: login nodes and jobs submit at once, and no append is atomic over NFS."""
    return layout.slurm / f"{name}.json"


def read(layout: RunLayout, *, forgotten: bool = False) -> list[Submission]:
    """All submissions, oldest first; those that were forgotten only where they are asked for."""
    try:
        names = sharedfs.list_dir(layout.slurm)
    except FileNotFoundError:
        return []
    files = [name for name in names if name.endswith(".json") and not name.startswith(".")]
    found = [msgspec.json.decode(sharedfs.read_bytes(layout.slurm / name), type=Submission) for name in files]
    found = [one for one in found if forgotten or not one.forgotten]
    return sorted(found, key=lambda one: (one.submitted_at, one.name))


def add(layout: RunLayout, submission: Submission) -> None:
    """Note a submission durably: a job that nobody knows of would run on unseen."""
    sharedfs.write_atomic(path(layout, submission.name), msgspec.json.encode(submission))


def forget(layout: RunLayout, submission: Submission) -> None:
    """Take a submission out of what the run consists of; that it was submitted stays true."""
    add(layout, msgspec.structs.replace(submission, forgotten=True))


def in_last_hour(submissions: list[Submission], now: float | None = None) -> int:
    """How many jobs were submitted within the last hour; `submissions` should hold the forgotten ones too."""
    now = time.time() if now is None else now
    return sum(one.submitted_at > now - 3600 for one in submissions)


def current(submissions: list[Submission]) -> list[Submission]:
    """The newest submission of each job: the ones that may still run."""
    newest = {one.job: one for one in submissions}
    return list(newest.values())


def by_clusters(submissions: Iterable[Submission]) -> dict[tuple[str, ...], list[str]]:
    """Job ids by where they were submitted: a bare id of one cluster may be somebody else's job on another."""
    found: dict[tuple[str, ...], list[str]] = {}
    for one in submissions:
        found.setdefault(tuple(one.clusters), []).append(one.job_id)
    return found


def home(submissions: list[Submission], clusters: Iterable[str]) -> list[str]:
    """Where the run's next job belongs: the cluster that took its first one, else any of the configured `clusters`."""
    taken = [one.clusters for one in submissions if len(one.clusters) == 1]
    return list(taken[0] if taken else clusters)
