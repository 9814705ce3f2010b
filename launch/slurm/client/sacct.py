"""sacct: jobs that the controller has forgotten, and what jobs used. Pure: command lines and how lines are read.

Columns and not --json, which took 0.36 s where these took 0.09. The window is always given: sacct's own begins at
midnight. Each attempt of a requeued job is a line of its own (--duplicates), oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from launch.slurm.client import fields
from launch.slurm.client.protocol import JobInfo, JobUsage, StepUsage
from launch.slurm.client.states import JobState, job_state, latest

JOB_COLUMNS: Final = (
    "JobID", "Cluster", "State", "ExitCode", "NodeList", "NNodes", "NCPUS", "AllocTRES", "ReqTRES", "Submit",
    "Eligible", "Start", "End", "TimelimitRaw", "Priority", "Reason", "Partition", "QOS", "Account", "User", "JobName",
)  # fmt: skip
USAGE_COLUMNS: Final = (
    "JobID", "State", "Partition", "Start", "ElapsedRaw", "NCPUS", "NNodes", "AllocTRES", "TotalCPU",
)  # fmt: skip
EARLIER_S: Final = 3600
"""How long before a submission the window begins: clocks of login node and database may differ."""


def arguments(ids: Sequence[str], since: float | None, clusters: Sequence[str], *, usage: bool = False) -> list[str]:
    """The command line; `since` is unix seconds, None for ever."""
    begin = datetime.fromtimestamp(max(0.0, (since or 0.0) - EARLIER_S), UTC).strftime("%Y-%m-%dT%H:%M:%S")
    columns = USAGE_COLUMNS if usage else JOB_COLUMNS
    argv = ["sacct", "--noheader", "--parsable2", "--duplicates", f"--starttime={begin}", f"--jobs={','.join(ids)}"]
    if not usage:
        argv.append("--allocations")
    if clusters:
        argv.append(f"--clusters={','.join(clusters)}")
    return [*argv, f"--format={','.join(columns)}"]


def _rows(out: str, columns: Sequence[str]) -> list[dict[str, str]]:
    # The last column is a name, which may hold a bar: what is too much belongs to it.
    lines = [line.split("|", len(columns) - 1) for line in out.splitlines()]
    return [dict(zip(columns, line, strict=True)) for line in lines if len(line) == len(columns)]


def parse_jobs(out: str) -> list[JobInfo]:
    """One JobInfo a job or component, of its last attempt, with the attempts before it counted as restarts."""
    attempts: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in _rows(out, JOB_COLUMNS):
        attempts.setdefault((row["Cluster"], row["JobID"]), []).append(row)
    return [_job(rows) for rows in attempts.values()]


def _job(rows: list[dict[str, str]]) -> JobInfo:
    row = rows[-1]
    state, restarts = latest([job_state(one["State"]) for one in rows])
    leader, offset = fields.job_ids(row["JobID"])
    code, ended_by = fields.exit_pair(row["ExitCode"])
    return JobInfo(
        job_id=row["JobID"], leader_id=leader, het_offset=offset, name=row["JobName"], user=row["User"],
        account=row["Account"], partition=row["Partition"], qos=row["QOS"], cluster=row["Cluster"], state=state,
        reason=fields.text(row["Reason"]) or None, nodes=fields.node_names(row["NodeList"]),
        node_count=fields.number(row["NNodes"]) or 0, cpus=fields.number(row["NCPUS"]) or 0,
        gpus=fields.gpus_in_tres(row["AllocTRES"] or row["ReqTRES"]),
        submitted_at=fields.unix_time(row["Submit"]), eligible_at=fields.unix_time(row["Eligible"]),
        started_at=fields.unix_time(row["Start"]), ended_at=fields.unix_time(row["End"]),
        time_limit_min=fields.number(row["TimelimitRaw"]), priority=fields.number(row["Priority"]),
        restarts=restarts, exit_code=code, exit_signal=ended_by, source="sacct",
    )  # fmt: skip


def parse_usage(out: str) -> list[JobUsage]:
    """One JobUsage an attempt, with its steps; lines of steps follow their job's, as sacct prints them."""
    found: list[JobUsage] = []
    job: dict[str, str] | None = None
    steps: list[StepUsage] = []
    for row in _rows(out, USAGE_COLUMNS):
        if "." in row["JobID"]:
            steps.append(_step(row))
            continue
        if job is not None:
            found.append(_usage(job, steps))
        job, steps = row, []
    return [*found, _usage(job, steps)] if job is not None else found


def _step(row: dict[str, str]) -> StepUsage:
    return StepUsage(
        step=row["JobID"].partition(".")[2], state=job_state(row["State"]),
        elapsed_s=fields.number(row["ElapsedRaw"]) or 0, alloc_cpus=fields.number(row["NCPUS"]) or 0,
        cpu_s=fields.seconds(row["TotalCPU"]) or 0.0,
    )  # fmt: skip


def _usage(row: dict[str, str], steps: list[StepUsage]) -> JobUsage:
    leader, offset = fields.job_ids(row["JobID"])
    state = job_state(row["State"])
    # A running step's CPU time is not in the database yet, and prints as zero.
    measured = [step.cpu_s for step in steps if step.state.ended]
    return JobUsage(
        job_id=row["JobID"], leader_id=leader, het_offset=offset, partition=row["Partition"], state=state,
        started_at=fields.unix_time(row["Start"]), elapsed_s=fields.number(row["ElapsedRaw"]) or 0,
        cpus=fields.number(row["NCPUS"]) or 0, gpus=fields.gpus_in_tres(row["AllocTRES"]),
        nodes=fields.number(row["NNodes"]) or 0, cpu_s=sum(measured) if measured else None, steps=tuple(steps),
    )  # fmt: skip


def uncertain(job: JobInfo) -> JobInfo:
    """What accounting says of a job while the controller does not answer: one that may return is taken to be queued."""
    if not job.state.may_return:
        return job
    return msgspec.structs.replace(job, state=JobState.REQUEUED)
