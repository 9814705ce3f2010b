"""What is wrong, or will go badly, with jobs before they are submitted: refusals and warnings, each with its way out.

Pure: the site and the paths come as values (SiteInfo of launch.slurm.client; Place of launch.slurm.places).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from conf.schema import Config
from launch.slurm.client.protocol import SiteInfo
from launch.slurm.findings import Finding, section_of
from launch.slurm.fitting import fit
from launch.slurm.places import Place
from launch.slurm.shapes import Component, Job, wanted

OWN_OPTIONS = {
    "array": "a run is one job; sweep with -m, or add workers with `rollmill scale`",
    "wrap": "the batch script is the run's own",
    "output": "batch output goes to slurm/ in the run directory",
    "error": "batch output goes to slurm/ in the run directory",
    "open-mode": "every attempt appends to one batch output",
    "job-name": "a lost submission is found again by the name that the run makes",
    "comment": "it carries the run's id",
    "signal": "the drain depends on it",
    "requeue": "set cluster.continue_by",
    "no-requeue": "set cluster.continue_by",
    "no-kill": "the placement decides it",
    "hold": "hold the job with `scontrol hold` after it is submitted",
    "test-only": "use action=plan",
    "parsable": "the run reads sbatch's own words",
    "wait": "use action=run",
    "nodes": "set pools.*.nodes or fleet.nodes",
    "ntasks": "set pools.*.workers",
    "ntasks-per-node": "set pools.*.workers",
    "cpus-per-task": "set pools.*.cpus_per_task",
    "mem": "set pools.*.mem_gib",
    "time": "set pools.*.time_min",
    "partition": "set cluster.partition, or a pool's",
    "account": "set cluster.account, or a pool's",
    "qos": "set cluster.qos, or a pool's",
    "clusters": "set cluster.clusters",
}
"""Options of sbatch that are not for cluster.extra_sbatch, with what to do instead."""

_SHORT = {
    "a": "array", "o": "output", "e": "error", "J": "job-name", "k": "no-kill", "H": "hold", "W": "wait", "N": "nodes",
    "n": "ntasks", "c": "cpus-per-task", "t": "time", "p": "partition", "A": "account", "q": "qos", "M": "clusters",
}  # fmt: skip


def check(
    config: Config, jobs: Sequence[Job], site: SiteInfo | None = None, places: Sequence[Place] = ()
) -> list[Finding]:
    """Everything to say about these jobs of a resolved configuration, refusals first.

    Args:
        config: the run's.
        jobs: what would be submitted.
        site: what the cluster is; None: not known, so only what holds everywhere is checked.
        places: files and directories that the jobs need.
    """
    found = [*_options(config), *_between_keys(config, jobs), *_paths(config, places)]
    for job in jobs:
        if job.het:
            found += _inherited(job)
        if site is not None:
            found += fit(config, job, site)
    found = list(dict.fromkeys(found))
    return sorted(found, key=lambda one: not one.fatal)


def _options(config: Config) -> Iterator[Finding]:
    for place, text in enumerate(config.cluster.extra_sbatch):
        key = f"cluster.extra_sbatch[{place}]"
        name = _option(text)
        if name is None:
            yield Finding(key, f"{key} got {text!r}; allowed: an option as sbatch takes it, as in --mail-type=END")
        elif name in OWN_OPTIONS:
            yield Finding(key, f"{key} got {text!r}, which is not free: {OWN_OPTIONS[name]}")


def _option(text: str) -> str | None:
    """The long name of the option; None where the text is none."""
    if match := re.match(r"--([a-z][a-z0-9-]*)(?:[= ]|$)", text):
        return match[1]
    return _SHORT.get(text[1], text[1]) if re.match(r"-[A-Za-z]", text) else None


def _between_keys(config: Config, jobs: Sequence[Job]) -> Iterator[Finding]:
    most = config.cluster.max_submissions_per_hour
    if len(jobs) > most:
        key = "cluster.max_submissions_per_hour"
        yield Finding(key, f"{key} got {most}, but this placement submits {len(jobs)} jobs; raise it, or placement=het")
    fleet = config.fleet
    if fleet.name == "vllm" and fleet.nodes > fleet.replicas:
        spans = fleet.nodes // fleet.replicas
        if fleet.nodes % fleet.replicas or fleet.gpus_per_replica % spans:
            yield Finding(
                "fleet.nodes",
                f"fleet.nodes got {fleet.nodes}; allowed above fleet.replicas={fleet.replicas}: a multiple, so that "
                f"fleet.gpus_per_replica={fleet.gpus_per_replica} divides evenly over a replica's nodes",
            )
    if any(job.name == "colocated" for job in jobs):
        for key in ("partition", "account", "qos"):
            names = wanted(config, key)
            if len(names) > 1:
                yield Finding(
                    f"cluster.{key}",
                    f"placement=colocated is one job, but its parts name {key} {' and '.join(names)}; "
                    f"set cluster.{key} alone, or placement=het",
                )


def _paths(config: Config, places: Sequence[Place]) -> Iterator[Finding]:
    run_dir = str(config.run_path)
    if "%" in run_dir:
        yield Finding("run_dir", f"run_dir got {run_dir}; allowed with Slurm: a path without %, which it would replace")
    for place in places:
        if place.blocked:
            yield Finding(
                place.key,
                f"{place.key} {place.path} cannot be read by the job: {place.blocked} is closed to uid {place.uid}; "
                f"{place.way_out}",
            )
        elif place.socket_bytes > place.socket_limit:
            yield Finding(
                place.key,
                f"{place.key} {place.path} is too long: a socket's path below it takes {place.socket_bytes} of "
                f"{place.socket_limit} bytes; {place.way_out}",
            )
    for filesystem in dict.fromkeys(place.filesystem for place in places if place.local):
        keys = [place.key for place in places if place.local and place.filesystem == filesystem]
        yield Finding(
            keys[0],
            f"{' and '.join(keys)} {'lie' if keys[1:] else 'lies'} on {filesystem}, which other nodes do not see; "
            "use the shared filesystem, unless every node has the same there or there is only this one",
            fatal=False,
        )


def _inherited(job: Job) -> Iterator[Finding]:
    """Memory, account and qos that sbatch hands on to later components that do not say their own (22.05, 24.11)."""
    for attribute, key in (("mem_mib", "mem_gib"), ("account", "account"), ("qos", "qos")):
        said: Component | None = None
        for component in job.components:
            if getattr(component, attribute) is not None:
                said = component
            elif said is not None:
                here, there = f"{section_of(component)}.{key}", f"{section_of(said)}.{key}"
                value = getattr(said, attribute)
                yield Finding(
                    here,
                    f"{here} is null after {there}, whose {value} Slurm would hand on in a heterogeneous job; "
                    f"set {here} too, or placement=linked",
                )
                break
