"""The Slurm part of `action=plan`: jobs, what checks say of them, estimated starts, ranked shapes, batch scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from conf.schema import Config
from launch.slurm import executor
from launch.slurm.checks import check
from launch.slurm.client import open_client
from launch.slurm.client.errors import SlurmError
from launch.slurm.client.protocol import SiteInfo
from launch.slurm.estimate import PLACEMENTS, Estimate, Ranked, estimate, rank
from launch.slurm.findings import Finding
from launch.slurm.places import places
from launch.slurm.shapes import Component, Job, SlurmPlacement, jobs_of


@dataclass(frozen=True, kw_only=True)
class SlurmPlan:
    """What is known of a configuration's jobs before they are submitted.

    Args:
        placement: the one that would be tried first.
        jobs: its jobs.
        scripts: placement -> job -> batch script; with `auto` those of the fallback too.
        findings: of the checks.
        estimates: one a placement; none where Slurm is not reachable.
        ranked: `cluster.shapes` and the configuration as it is, the earliest first; empty without shapes.
        no_estimate: why there are none.
    """

    placement: SlurmPlacement
    jobs: tuple[Job, ...]
    scripts: Mapping[str, Mapping[str, str]]
    findings: Sequence[Finding] = ()
    estimates: Sequence[Estimate] = ()
    ranked: Sequence[Ranked] = field(default=())
    no_estimate: str = ""


def candidates(config: Config) -> tuple[SlurmPlacement, ...]:
    """The placements that a configuration may come to, the first to be tried first."""
    name = config.placement.name
    if name == "auto":
        nodes = sum(job.nodes for job in jobs_of(config, "het"))
        large = nodes > config.cluster.het_max_nodes or not config.cluster.het_max_pending_s
        return ("linked",) if large else ("het", "linked")
    if name == "local":
        raise ValueError("placement=local has no Slurm jobs")
    return (name,)


def make_plan(config: Config) -> SlurmPlan:
    """Ask Slurm, where it can be reached, and make the plan of a resolved configuration. Blocking; changes nothing."""
    chosen = candidates(config)
    scripts: dict[str, dict[str, str]] = {
        placement: {
            job.name: executor.text(job, config, run_id="RUN_ID", name=f"rollmill-RUN_ID-{job.name}-0000")
            for job in jobs_of(config, placement)
        }
        for placement in chosen
    }
    jobs = jobs_of(config, chosen[0])
    site, problem = _site(config)
    estimates: list[Estimate] = []
    ranked: list[Ranked] = []
    if site is not None:
        estimates = [estimate(config, placement) for placement in PLACEMENTS]
        ranked = rank(config, chosen[0]) if config.cluster.shapes else []
    return SlurmPlan(
        placement=chosen[0],
        jobs=jobs,
        scripts=scripts,
        findings=check(config, jobs, site, places(config)),
        estimates=estimates,
        ranked=ranked,
        no_estimate=problem,
    )


def _site(config: Config) -> tuple[SiteInfo | None, str]:
    try:
        return asyncio.run(open_client(config.cluster.clusters).site()), ""
    except SlurmError as error:
        return None, str(error)


def processes(plan: SlurmPlan) -> dict[str, int]:
    """Process kind -> how many in all jobs."""
    counts: dict[str, int] = {}
    for job in plan.jobs:
        for step in job.steps:
            for share in step.shares:
                counts[share.kind] = counts.get(share.kind, 0) + share.last - share.first + 1
    return counts


def as_data(plan: SlurmPlan) -> dict[str, Any]:
    """The plan as plain data, without the scripts."""
    document: dict[str, Any] = {
        "first_tried": plan.placement,
        "jobs": {job.name: [_component(component) for component in job.components] for job in plan.jobs},
        "refused": [one.message for one in plan.findings if one.fatal],
        "warnings": [one.message for one in plan.findings if not one.fatal],
    }
    if plan.no_estimate:
        document["no_estimate"] = plan.no_estimate
    else:
        document["estimated_start"] = {one.placement: _estimate(one) for one in plan.estimates}
    if plan.ranked:
        document["shapes"] = [
            {"keys": dict(one.keys) if one.place >= 0 else "as configured", **_estimate(one.estimate)}
            for one in plan.ranked
        ]
    return document


def _component(component: Component) -> dict[str, Any]:
    """One component in the words of the configuration; what is left to the site is left out."""
    figures: dict[str, Any] = {
        "component": component.name,
        "nodes": component.nodes,
        "processes_a_node": dict(component.kinds),
        "cpus_a_node": component.cpus_per_task,
        "mem_mib_a_node": component.mem_mib,
        "gpus_a_node": component.gpus or None,
        "partition": component.partition,
        "account": component.account,
        "qos": component.qos,
        "time_min": component.time_min,
    }
    return {key: value for key, value in figures.items() if value is not None}


def _estimate(one: Estimate) -> dict[str, Any]:
    if one.in_s is None:
        return {"starts": "never as asked", "reason": one.problem}
    return {"starts": "now" if one.in_s == 0 else f"in {words(one.in_s)}", "in_s": one.in_s, "nodes": _nodes(one)}


def _nodes(one: Estimate) -> dict[str, str]:
    return {start.job: start.nodes for start in one.starts if start.nodes}


def words(seconds: int) -> str:
    """A duration as people say it, two units at most: 40 s, 12 min, 3 h 5 min, 2 d 4 h."""
    units: tuple[tuple[Literal["d", "h", "min", "s"], int], ...] = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    parts: list[str] = []
    for unit, size in units:
        count, seconds = divmod(seconds, size)
        if count and (unit != "s" or not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"
