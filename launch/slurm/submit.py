"""Submits a run: its placement's jobs by submitit, each noted down; one that exists is carried on or refused."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from conf.load import load_config
from conf.schema import Config
from launch.errors import Exit, LaunchError
from launch.opening import check_parts, drop_summary, furnish, open_run, show_finished
from launch.slurm import executor, record, render
from launch.slurm.checks import check
from launch.slurm.client import open_client
from launch.slurm.client.errors import SlurmError
from launch.slurm.code import code_digest
from launch.slurm.errors import SubmissionError
from launch.slurm.findings import refuse
from launch.slurm.places import places
from launch.slurm.record import Submission
from launch.slurm.shapes import Job, SlurmPlacement, jobs_of
from stages import manifest, sharedfs
from stages.layout import RunLayout
from stages.summary import read_summary

FAILED_S: Final = 86400.0
"""How long a node that failed under a run is left out of its submissions."""
_NODE_FAILURE: Final = re.compile(r"Node failure on ([\w.-]+)")


class TooManySubmissionsError(LaunchError):
    """The run has submitted as many jobs within an hour as it may."""


async def submit_run(config: Config) -> int:
    """Submit a run, or carry one on, or say that it runs or has ended; returns the exit code."""
    layout = RunLayout(config.run_path)
    await check_parts(config)
    config = await _with_checkpoints(config)
    opened = await open_run(config, layout)
    if opened.state == "finished":
        return show_finished(layout)
    submissions = await asyncio.to_thread(record.read, layout)
    if submissions:
        from launch.slurm.standing import carry_on, end_leftovers, live_jobs

        live = await live_jobs(config, submissions)
        names = ", ".join(f"{job.job_id} ({job.state.value})" for job in live)
        if carry_on(submissions, live):
            sys.stdout.write(f"{layout.root}: goes on already as job {names}; `rollmill status` shows it\n")
            return await _end(config, layout)
        if live:
            await end_leftovers(layout, submissions, live)
            sys.stdout.write(
                f"{layout.root}: no job with its router is left, so {names} ended; all are submitted anew\n"
            )
    left = await asyncio.to_thread(read_summary, layout)
    await asyncio.to_thread(furnish, layout, keep_summary=True)
    reason = "resume" if submissions else "launch"
    made = await asyncio.to_thread(place, config, layout, opened.manifest.run_id, reason)
    await asyncio.to_thread(drop_summary, layout, left)
    _show(layout, made)
    return await _end(config, layout)


async def _with_checkpoints(config: Config) -> Config:
    """Every turn is checkpointed where the RUN pool may be preempted, unless the configuration says otherwise.

    A run that is there keeps what it began with, whatever has become of the partition.
    """
    if config.checkpoint.turns is not None:
        return config
    if await asyncio.to_thread(sharedfs.exists, RunLayout(config.run_path).manifest):
        begun = await asyncio.to_thread(load_config, config.run_path)
        return replace(config, checkpoint=replace(config.checkpoint, turns=begun.checkpoint.turns))
    pool = config.pools.run
    name = pool.partition or config.cluster.partition
    try:
        partitions = await open_client(config.cluster.clusters).partitions()
    except SlurmError:
        partitions = ()  # sbatch will say what is wrong
    names = name.split(",") if name else []  # of several, Slurm takes the one that starts first
    mine = [one for one in partitions if one.name in names or (not names and one.default)]
    turns = int(any(one.preempt_mode.upper() not in {"", "OFF"} for one in mine))
    return replace(config, checkpoint=replace(config.checkpoint, turns=turns))


async def _end(config: Config, layout: RunLayout) -> int:
    """action=submit returns at once, action=run when the run has ended."""
    if config.action != "run":
        return Exit.DONE
    from launch.slurm.follow import follow
    from launch.slurm.watch import RunWatch

    return await follow(RunWatch(config, layout), layout, config.fs.visibility_s)


def place(config: Config, layout: RunLayout, run_id: str, reason: str) -> list[Submission]:
    """Submit the jobs of the configured placement; `auto` takes het, else linked. Blocking.

    Raises:
        ShapeError: the configuration asks for something that cannot be.
        SubmissionError: Slurm refused, or was not reached.
        TooManySubmissionsError: the run's bound an hour.
    """
    name = config.placement.name
    if name != "auto":
        return _submit_all(config, layout, run_id, name, reason)  # type: ignore[arg-type]
    nodes = sum(job.nodes for job in jobs_of(config, "het"))
    if nodes > config.cluster.het_max_nodes or not config.cluster.het_max_pending_s:
        return _submit_all(config, layout, run_id, "linked", reason)
    try:
        made = _submit_all(_yielding(config, nodes), layout, run_id, "het", reason)
    except SubmissionError as error:
        if not error.refused:
            raise
        sys.stderr.write(f"rollmill: no heterogeneous job here, so linked jobs: {error}\n")
        return _submit_all(config, layout, run_id, "linked", reason)
    try:
        return [*made, _submit_fallback(config, layout, run_id)]
    except LaunchError as error:
        sys.stderr.write(
            f"rollmill: the heterogeneous job is in the queue, but no linked job waits behind it: {error}\n"
        )
        return made


def _yielding(config: Config, nodes: int) -> Config:
    """With a nice value that lets the job held back behind the heterogeneous one pass it when its time has come.

    Slurm plans nodes for every part of the heterogeneous job, also while others cannot start, and starts nothing of
    lower priority on them. By then that job has the higher one: it has waited longer, and asks for more.
    """
    try:
        site = asyncio.run(open_client(config.cluster.clusters).site())
    except SlurmError:
        return config  # sbatch will say what is wrong
    aged = min(site.age_most, math.ceil(site.age_points * config.cluster.het_max_pending_s))
    larger = math.ceil(site.size_most * min(1.0, nodes / max(1, len(site.nodes))))
    nice = (config.cluster.nice or 0) + aged + larger + 1
    return replace(config, cluster=replace(config.cluster, nice=nice))


def _submit_fallback(config: Config, layout: RunLayout, run_id: str) -> Submission:
    """The router's linked job, held back: where it starts first, the heterogeneous job has waited too long.

    So the change of placement needs nobody who waits and watches.
    """
    control = jobs_of(config, "linked")[0]
    later = f"--begin=now+{round(config.cluster.het_max_pending_s)}"
    return submit_job(config, layout, run_id, control, "linked", "fallback", options=[later])


def submit_rest(config: Config, layout: RunLayout, run_id: str, first: Submission) -> list[Submission]:
    """The linked jobs beside the router's, `first`, when that has started as the fallback; those there are stay."""
    there = {one.job for one in record.read(layout) if one.submitted_at >= first.submitted_at}
    rest = [job for job in jobs_of(config, "linked") if job.name not in there]
    return [submit_job(config, layout, run_id, job, "linked", "fallback", code=first.code) for job in rest]


def _submit_all(
    config: Config, layout: RunLayout, run_id: str, placement: SlurmPlacement, reason: str
) -> list[Submission]:
    jobs = jobs_of(config, placement)
    # Only what needs no question to Slurm: what the site cannot give, sbatch itself refuses in a moment.
    for warning in refuse(check(config, jobs, None, places(config))):
        sys.stderr.write(f"rollmill: {warning}\n")
    made: list[Submission] = []
    try:
        for job in jobs:
            made.append(submit_job(config, layout, run_id, job, placement, reason))  # noqa: PERF401 - kept at a refusal
    except LaunchError:
        if made:
            _take_back(layout, made)
        raise
    return made


def _take_back(layout: RunLayout, made: Sequence[Submission]) -> None:
    """Part of a placement would hold nodes and wait for ever for the rest."""
    for clusters, ids in record.by_clusters(made).items():
        try:
            asyncio.run(open_client(clusters).cancel(ids))
        except SlurmError as error:
            sys.stderr.write(f"rollmill: jobs {', '.join(ids)} stay in the queue, `scancel` them: {error}\n")
            return
    for one in made:
        record.forget(layout, one)


def submit_job(
    config: Config,
    layout: RunLayout,
    run_id: str,
    job: Job,
    placement: SlurmPlacement,
    reason: str,
    *,
    options: Sequence[str] = (),
    workers: int = 0,
    first: int = 1,
    code: str = "",
) -> Submission:
    """Submit one job and note it down. Blocking.

    `code` is the digest of the code that a person submitted; "" where this is that submission.

    Raises:
        SubmissionError: Slurm refused, or was not reached.
        TooManySubmissionsError: the run's bound an hour.
    """
    from launch.slurm.leader import lead

    cluster = config.cluster
    _check_rate(layout, cluster.max_submissions_per_hour)
    clusters = record.home(record.read(layout), cluster.clusters)
    exclude = list(dict.fromkeys([*cluster.exclude, *_spared(job, failed_nodes(layout), clusters)]))
    extra = [*cluster.extra_sbatch, *options]
    adapted = replace(config, cluster=replace(cluster, extra_sbatch=extra, exclude=exclude, clusters=clusters))
    name = render.job_name(run_id, job, secrets.token_hex(2))
    done = executor.submit(
        job, adapted, run_id=run_id, name=name, function=lead, args=(str(layout.root), job.name, job.signal_s)
    )
    submission = Submission(
        name=name,
        job=job.name,
        job_id=done.job_id,
        placement=placement,
        components=[component.name for component in job.components],
        clusters=[done.cluster] if done.cluster else clusters,
        submitted_at=time.time(),
        script=layout.relative(done.script),
        reason=reason,
        first=first,
        workers=workers,
        control=any(step.name == "control" for step in job.steps),
        code=code or code_digest(),
    )
    record.add(layout, submission)
    return submission


def _check_rate(layout: RunLayout, most: int) -> None:
    lately = record.in_last_hour(record.read(layout, forgotten=True))
    if lately >= most:
        raise TooManySubmissionsError(
            f"{layout.root}: {lately} jobs were submitted within an hour, as many as "
            f"cluster.max_submissions_per_hour={most} allows; wait, or start a run with a higher bound"
        )


def failed_nodes(layout: RunLayout) -> list[str]:
    """Nodes that failed under this run within a day, as its batch output tells: its next submission asks for others.

    Longer ago they may well have been mended, and a run that goes on for weeks would leave out ever more of them.
    """
    found: dict[str, None] = {}
    for output in sorted(Path(layout.slurm).glob("*.out")):
        if output.stat().st_mtime < time.time() - FAILED_S:
            continue
        found.update(dict.fromkeys(_NODE_FAILURE.findall(output.read_text(errors="replace"))))
    return list(found)


def _spared(job: Job, failed: list[str], clusters: Sequence[str]) -> list[str]:
    """The failed nodes, where the job's partitions have enough others: without those it would wait for ever."""
    if not failed:
        return []
    try:
        site = asyncio.run(open_client(clusters).site())
    except SlurmError:
        return failed
    for partition in {component.partition for component in job.components}:
        wanted = sum(one.nodes for one in job.components if one.partition == partition)
        there = {node.name for part in site.partitions_of(partition) for node in site.nodes_of(part.name)}
        if len(there - set(failed)) < wanted:
            sys.stderr.write(f"rollmill: {', '.join(failed)} failed, but without it there are too few nodes\n")
            return []
    return failed


def run_id_of(layout: RunLayout) -> str:
    """The id of the run in this directory.

    Raises:
        LaunchError: there is none.
    """
    found = manifest.read(layout)
    if found is None:
        raise LaunchError(f"{layout.root} is no run directory: it has no manifest.json")
    return found.run_id


def _show(layout: RunLayout, made: Sequence[Submission]) -> None:
    for one in made:
        parts = "+".join(one.components)
        sys.stdout.write(f"{layout.root}: {one.job} ({parts}) is job {one.job_id}; script {one.script}\n")
    sys.stdout.write(f"{layout.root}: `rollmill status` and `rollmill logs` with this directory show it\n")
