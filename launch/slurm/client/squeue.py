"""squeue: which columns are asked for, and how a line becomes a JobInfo. Pure.

Columns and not --json, for two measured reasons: squeue 22.05 ignores every filter beside --json and prints the whole
queue, 3.5 KB a job; and a user's jobs alone, which the controller filters itself, take 5 ms in columns. The JSON reader
(json_shapes.py) takes over where the columns cannot be had or read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from launch.slurm.client import fields
from launch.slurm.client.protocol import JobInfo
from launch.slurm.client.states import job_state

SEPARATOR: Final = "\x1f"
"""ASCII's own unit separator: names and comments hold commas, bars and spaces."""

COLUMNS: Final = (
    "JobID", "HetJobID", "HetJobOffset", "Cluster", "State", "Reason", "NodeList", "NumNodes", "NumCPUs", "tres-alloc",
    "SubmitTime", "EligibleTime", "StartTime", "EndTime", "TimeLimit", "PriorityLong", "RestartCnt", "exit_code",
    "Partition", "QOS", "Account", "UserName", "Name", "Comment",
)  # fmt: skip


class UnreadableError(ValueError):
    """The output is not what these columns give."""


def arguments(ids: Sequence[str], name: str | None, user: str, clusters: Sequence[str], *, json: bool) -> list[str]:
    """The command line, which costs the controller two calls: its partitions, and the jobs of this user alone.

    `--local` saves a third, about the federation. Where a federation's jobs move, the clusters have to be named.
    """
    argv = ["squeue", "--noheader", "--states=all", *([] if clusters else ["--local"])]
    if user:
        argv.append(f"--user={user}")
    if ids:
        argv.append(f"--jobs={','.join(ids)}")
    if name is not None:
        argv.append(f"--name={name}")
    if clusters:
        argv.append(f"--clusters={','.join(clusters)}")
    argv.append("--json" if json else "--Format=" + ",".join(f"{column}:{SEPARATOR}" for column in COLUMNS))
    return argv


def parse(out: str) -> list[JobInfo]:
    """The jobs that squeue printed.

    Raises:
        UnreadableError: a line has not as many fields as columns were asked for.
    """
    lines = [line for line in out.splitlines() if line and not line.startswith("CLUSTER: ")]
    return [_job(line) for line in lines]


def _job(line: str) -> JobInfo:
    values = line.removesuffix(SEPARATOR).split(SEPARATOR)
    if len(values) != len(COLUMNS):
        raise UnreadableError(f"squeue printed {len(values)} fields where {len(COLUMNS)} were asked for: {line[:80]!r}")
    said = dict(zip(COLUMNS, values, strict=True))
    state = job_state(said["State"])
    leader = fields.number(said["HetJobID"])
    offset = fields.number(said["HetJobOffset"]) if leader else None
    starts = fields.unix_time(said["StartTime"])
    code, ended_by = fields.exit_column(said["exit_code"])
    return JobInfo(
        job_id=said["JobID"].strip() if not leader else f"{leader}+{offset or 0}",
        leader_id=str(leader or said["JobID"].strip()),
        het_offset=(offset or 0) if leader else None,
        name=fields.text(said["Name"]), user=fields.text(said["UserName"]), account=fields.text(said["Account"]),
        partition=fields.text(said["Partition"]), qos=fields.text(said["QOS"]), cluster=fields.text(said["Cluster"]),
        comment=fields.text(said["Comment"]), state=state, reason=fields.text(said["Reason"]) or None,
        nodes=fields.node_names(said["NodeList"]), node_count=fields.number(said["NumNodes"]) or 0,
        cpus=fields.number(said["NumCPUs"]) or 0, gpus=fields.gpus_in_tres(said["tres-alloc"]),
        submitted_at=fields.unix_time(said["SubmitTime"]), eligible_at=fields.unix_time(said["EligibleTime"]),
        started_at=None if state.waiting else starts,
        ended_at=None if state.waiting else fields.unix_time(said["EndTime"]),
        estimated_start=starts if state.waiting else None,
        time_limit_min=fields.limit_min(said["TimeLimit"]), priority=fields.number(said["PriorityLong"]),
        restarts=fields.number(said["RestartCnt"]) or 0, exit_code=code, exit_signal=ended_by, source="squeue",
    )  # fmt: skip
