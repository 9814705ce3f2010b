"""`rollmill status`: where a run stands, from its router or files, and what Slurm says of its jobs."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.errors import Exit
from launch.figures import STAGES, duration, snapshot
from launch.rundirs import find_run_dir
from launch.verbs.arguments import verb_parser


def run(name: str, args: Sequence[str]) -> int:
    """Print the status."""
    parser = verb_parser(name)
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    chosen = parser.parse_args(args)
    status = asyncio.run(_status(find_run_dir(chosen.run_dir)))
    sys.stdout.write(json.dumps(status) + "\n" if chosen.json else status_text(status))
    return Exit.DONE


async def _status(run_dir: Path) -> dict[str, Any]:
    """The status document; Slurm is asked only about a run that was submitted to it."""
    from launch.slurm import record
    from stages.layout import RunLayout
    from stages.status import fetch_status

    layout = RunLayout(run_dir)
    if not await asyncio.to_thread(record.read, layout):
        return await fetch_status(run_dir)
    from conf.load import load_config
    from launch.slurm.watch import RunWatch

    return await RunWatch(await asyncio.to_thread(load_config, run_dir), layout).status()


def status_text(status: Mapping[str, Any]) -> str:
    """A status document for people."""
    now = snapshot(status)
    lines = [
        f"run      {status.get('run_id', 'unknown')}: {now.state}",
        f"rollouts {now.ended} of {now.accepted} ended: {now.completed} completed, {now.failed} failed, "
        f"{now.cancelled} cancelled",
        *(f"{stage:<8} {now.queued[stage]} queued, {now.leased[stage]} leased" for stage in STAGES),
    ]
    if now.reward_mean is not None:
        lines.append(f"reward   {now.reward_mean:.4f} mean")
    lines += [_replica(item) for item in status.get("fleet") or () if isinstance(item, Mapping)]
    members = Counter(str(item.get("kind")) for item in status.get("members") or () if isinstance(item, Mapping))
    if members:
        lines.append("members  " + ", ".join(f"{count} {kind}" for kind, count in sorted(members.items())))
    slurm = status.get("slurm")
    lines += slurm_lines(slurm, time.time()) if isinstance(slurm, Mapping) else []
    if now.stuck:
        lines.append(f"stuck    {now.stuck}")
    return "\n".join(lines) + "\n"


def slurm_lines(slurm: Mapping[str, Any], now: float) -> list[str]:
    """The Slurm part for people: a line a job, the fair-share factor, and what would start sooner."""
    lines = [_job(item, now) for item in slurm.get("jobs") or () if isinstance(item, Mapping)]
    words = [str(line) for line in slurm.get("words") or ()]
    share = slurm.get("fair_share")
    said = any("fair-share factor" in line for line in words)
    if isinstance(share, Mapping) and share.get("factor") is not None and not said:
        words.append(f"fair-share factor {share['factor']:.2f} ({share.get('user')}, {share.get('account')})")
    lines += [f"slurm    {line}" for line in words]
    return lines + _used(slurm)


def _used(slurm: Mapping[str, Any]) -> list[str]:
    """What the run has used, where accounting says so."""
    pools = slurm.get("pools")
    if not isinstance(pools, Mapping):
        return []
    lines = []
    for name, used in [*pools.items(), ("all", slurm.get("total") or {})]:
        idle, cost = used.get("idle_share"), used.get("cost_per_1000")
        said = f"used     {name}: {used.get('cpu_hours', 0):.2f} CPU-hours"
        said += f" ({idle:.0%} idle)" if idle is not None else ""
        said += f", {used.get('gpu_hours', 0):.2f} GPU-hours"
        if cost:
            said += f"; a thousand rollouts: {cost['cpu_hours']:.2f} CPU-hours, {cost['gpu_hours']:.2f} GPU-hours"
        lines.append(said)
    return lines


def _job(job: Mapping[str, Any], now: float) -> str:
    said = f"job      {job.get('job_id')} {job.get('component') or '-'}: {job.get('state')}"
    if job.get("reason") and job.get("state") in {"pending", "requeued"}:
        said += f" ({job['reason']})"
    nodes = [str(node) for node in job.get("nodes") or ()]
    parts = [
        f"on {', '.join(nodes[:4])}{f' and {len(nodes) - 4} more' if len(nodes) > 4 else ''}" if nodes else "",
        f"partition {job['partition']}" if job.get("partition") else "",
        f"priority {job['priority']}" if job.get("priority") else "",
        f"starts in {duration(job['estimated_start'] - now)}" if (job.get("estimated_start") or 0) > now else "",
        f"restarts {job['restarts']}" if job.get("restarts") else "",
        f"exit code {job['exit_code']}" if job.get("exit_code") else "",
        f"signal {job['exit_signal']}" if job.get("exit_signal") else "",
    ]
    return ", ".join([said, *(part for part in parts if part)])


def _replica(replica: Mapping[str, Any]) -> str:
    state, sessions = replica.get("state", ""), replica.get("sessions", 0)
    said = f"replica  {replica.get('id')} {state} at {replica.get('url')}, {sessions} sessions"
    return f"{said} ({replica['reason']})" if replica.get("reason") else said
