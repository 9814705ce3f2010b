"""The submissions of a run, one file each below slurm/: what was asked of Slurm, when, and under which job id."""

from __future__ import annotations

import os
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


def add_new(layout: RunLayout, submission: Submission) -> Submission:
    """Note a submission unless one of its name is there; returns the one that is there then, whoever made it."""
    target = path(layout, submission.name)
    temp = sharedfs.temp_beside(target)
    sharedfs.create_exclusive(temp, msgspec.json.encode(submission))
    try:
        if sharedfs.link(temp, target):
            return submission
    finally:
        sharedfs.unlink(temp)
    return find(layout, submission.name) or submission


def find(layout: RunLayout, name: str) -> Submission | None:
    """The submission of this name, by opening its file: what has just been made elsewhere may not be listed yet."""
    try:
        return msgspec.json.decode(sharedfs.read_bytes(path(layout, name)), type=Submission)
    except FileNotFoundError:
        return None


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


def continued(submissions: Iterable[Submission], job: str) -> int:
    """How often a job was submitted again by the run itself since somebody last launched or resumed it."""
    reasons = [one.reason for one in submissions if one.job == job]
    by_people = [place for place, reason in enumerate(reasons) if reason != "continue"]
    return len(reasons) - 1 - max(by_people, default=-1)


def by_clusters(submissions: Iterable[Submission]) -> dict[tuple[str, ...], list[str]]:
    """Job ids by where they were submitted: a bare id of one cluster may be somebody else's job on another."""
    found: dict[tuple[str, ...], list[str]] = {}
    for one in submissions:
        found.setdefault(tuple(one.clusters), []).append(one.job_id)
    return found


def here(clusters: Iterable[str]) -> list[str]:
    """Of these clusters the one that this job runs in, as Slurm says; none where none is named."""
    given, mine = list(clusters), os.environ.get("SLURM_CLUSTER_NAME")
    return [mine] if len(given) > 1 and mine else given


def home(submissions: list[Submission], clusters: Iterable[str]) -> list[str]:
    """Where the run's next job belongs: the cluster that took its first one, else any of the configured `clusters`."""
    taken = [one.clusters for one in submissions if len(one.clusters) == 1]
    return list(taken[0] if taken else clusters)
