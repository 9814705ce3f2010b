"""What a run used, by pool, from Slurm's accounting: for the `slurm` key of report/summary.json.

CPU-hours are allotted CPUs times elapsed time, whatever they did; the idle share is what of them no process used, by
the CPU time of the steps that have ended. GPU-hours are allotted GPUs times elapsed time. Nothing is invented: where
the site keeps no accounts, and for figures that accounting does not hold, there is null and a reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from launch.slurm.client.errors import SlurmError
from launch.slurm.client.protocol import JobUsage, SlurmClient
from launch.slurm.record import Submission
from stages.layout import RunLayout
from stages.summary import read_summary, write_summary

HOUR_S: Final = 3600.0


async def account(client: SlurmClient, submissions: Sequence[Submission], rollouts: int) -> dict[str, Any]:
    """The summary's `slurm` value for a run with these submissions, which completed so many rollouts; one query.

    `pools` and `total` are null where accounting says nothing, with a `reason`; `settled`: all jobs have ended.
    """
    ids = list(dict.fromkeys(one.job_id for one in submissions))
    jobs = {"job_ids": ids, "submissions": len(submissions)}
    nothing = {**jobs, "pools": None, "total": None, "settled": False}
    if not ids:
        return {**nothing, "reason": "the run was not submitted to Slurm"}
    try:
        usages = await client.accounting(ids, min(one.submitted_at for one in submissions))
    except SlurmError as error:
        return {**nothing, "reason": str(error)}
    if usages is None:
        return {
            **jobs,
            "pools": None,
            "total": None,
            "settled": False,
            "reason": "this site keeps no accounts (sacct is off)",
        }
    if not usages:
        return {
            **jobs,
            "pools": None,
            "total": None,
            "settled": False,
            "reason": "accounting does not know these jobs yet",
        }
    return {**jobs, **summarize(usages, submissions, rollouts)}


def settle(layout: RunLayout, used: Mapping[str, Any]) -> None:
    """Put the final figures into report/summary.json, where there is one: a job cannot do so before it has ended."""
    summary = read_summary(layout)
    if summary is not None:
        write_summary(layout, {**summary, "slurm": {**(summary.get("slurm") or {}), **used}})


def summarize(usages: Sequence[JobUsage], submissions: Sequence[Submission], rollouts: int) -> dict[str, Any]:
    """Figures a pool and in all: cpu_hours, gpu_hours, idle_share, attempts, cost_per_1000 (hours of each kind)."""
    names = component_names(submissions)
    pools: dict[str, list[JobUsage]] = {}
    for usage in usages:
        pools.setdefault(names.get(usage.job_id, "unknown"), []).append(usage)
    figures = {name: _figures(parts, rollouts) for name, parts in sorted(pools.items())}
    total = _figures(usages, rollouts)
    last = {usage.job_id: usage for usage in usages}
    settled = all(usage.state.ended for usage in last.values())
    reason = None if settled else "jobs of the run have not ended in accounting yet: these figures will grow"
    return {"pools": figures, "total": total, "settled": settled, "reason": reason}


def component_names(submissions: Sequence[Submission]) -> dict[str, str]:
    """Component by job id as Slurm writes it: {"9+0": "control", "9+1": "init"}, or {"9": "run"}."""
    names: dict[str, str] = {}
    for one in submissions:
        if len(one.components) == 1:
            names[one.job_id] = one.components[0]
            continue
        names.update({f"{one.job_id}+{offset}": name for offset, name in enumerate(one.components)})
    return names


def _figures(usages: Sequence[JobUsage], rollouts: int) -> dict[str, Any]:
    cpu_hours = sum(usage.cpus * usage.elapsed_s for usage in usages if usage.started_at) / HOUR_S
    gpu_hours = sum(usage.gpus * usage.elapsed_s for usage in usages if usage.started_at) / HOUR_S
    return {
        "cpu_hours": round(cpu_hours, 6),
        "gpu_hours": round(gpu_hours, 6),
        "idle_share": _idle_share(usages),
        "attempts": _attempts(usages),
        "cost_per_1000": _cost({"cpu_hours": cpu_hours, "gpu_hours": gpu_hours}, rollouts),
    }


def _idle_share(usages: Sequence[JobUsage]) -> float | None:
    """Part of the allotted CPU time that nothing used, over the attempts whose CPU time is known; None for none."""
    measured = [usage for usage in usages if usage.cpu_s is not None and usage.elapsed_s and usage.cpus]
    allotted = sum(usage.cpus * usage.elapsed_s for usage in measured)
    used = sum(usage.cpu_s or 0.0 for usage in measured)
    return round(min(1.0, max(0.0, 1 - used / allotted)), 4) if allotted else None


def _attempts(usages: Sequence[JobUsage]) -> int:
    """Starts of the component that started most often."""
    counts: dict[str, int] = {}
    for usage in usages:
        if usage.started_at:
            counts[usage.job_id] = counts.get(usage.job_id, 0) + 1
    return max(counts.values(), default=0)


def _cost(hours: Mapping[str, float], rollouts: int) -> dict[str, float] | None:
    """Hours for a thousand rollouts at this run's pace; None where none has ended."""
    return {name: round(value * 1000 / rollouts, 6) for name, value in hours.items()} if rollouts > 0 else None
