"""squeue's JSON, in the two shapes that Slurm has given it: plain values (22.05) and wrapped ones (23.11 and later).

22.05 says `"job_state": "PENDING", "priority": 0`; later versions say `"job_state": ["PENDING"], "priority": {"set":
true, "infinite": false, "number": 3847}`. Both are read, key by key, whatever version a site runs. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from launch.slurm.client import fields
from launch.slurm.client.protocol import JobInfo
from launch.slurm.client.squeue import UnreadableError
from launch.slurm.client.states import job_state


def parse(out: str, *, ids: Sequence[str] = (), name: str | None = None, user: str = "") -> list[JobInfo]:
    """The jobs that were asked for: 22.05 prints the whole queue whatever the filters say, so they are applied here.

    Raises:
        UnreadableError: no JSON of squeue.
    """
    try:
        jobs = msgspec.json.decode(out)["jobs"]
        found = [_job(job) for job in jobs]
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableError(f"squeue --json printed something else: {error!r}") from error
    return [job for job in found if _wanted(job, ids, name, user)]


def _wanted(job: JobInfo, ids: Sequence[str], name: str | None, user: str) -> bool:
    if ids and job.leader_id not in ids:
        return False
    return (name is None or job.name == name) and (not user or job.user == user)


def plain(value: Any) -> Any:
    """A value without its wrapping: None for "not set" and "infinite"."""
    if isinstance(value, Mapping) and "number" in value:
        return value["number"] if value.get("set", True) and not value.get("infinite", False) else None
    return value


def _whole(value: Any) -> int:
    found = plain(value)
    return int(found) if isinstance(found, (int, float)) else 0


def _words(value: Any) -> str | list[str]:
    return [str(word) for word in value] if isinstance(value, Iterable) and not isinstance(value, str) else str(value)


def _exit(value: Any) -> tuple[int, int]:
    """(exit code, signal) of a wait status (22.05) or of a record of both."""
    if not isinstance(value, Mapping) or "return_code" not in value:
        return fields.wait_status(_whole(value))
    killer = value.get("signal")
    number = killer.get("id", killer.get("signal_id")) if isinstance(killer, Mapping) else killer
    return _whole(value["return_code"]), _whole(number)


def _job(job: Mapping[str, Any]) -> JobInfo:
    state = job_state(_words(job["job_state"]))
    leader, offset = _whole(job.get("het_job_id")), _whole(job.get("het_job_offset"))
    number = str(_whole(job["job_id"]))
    starts = _whole(job.get("start_time")) or None
    code, ended_by = _exit(job.get("exit_code"))
    limit, priority = plain(job.get("time_limit")), plain(job.get("priority"))
    return JobInfo(
        job_id=f"{leader}+{offset}" if leader else number,
        leader_id=str(leader) if leader else number,
        het_offset=offset if leader else None,
        name=str(job.get("name", "")), user=str(job.get("user_name", "")), account=str(job.get("account", "")),
        partition=str(job.get("partition", "")), qos=str(job.get("qos", "")), cluster=str(job.get("cluster", "")),
        comment=_comment(job.get("comment", "")), state=state,
        reason=fields.text(str(job.get("state_reason", ""))) or None,
        nodes=fields.node_names(str(job.get("nodes", ""))), node_count=_whole(job.get("node_count")),
        cpus=_whole(job.get("cpus")),
        gpus=fields.gpus_in_tres(str(job.get("tres_alloc_str") or job.get("tres_req_str") or "")),
        submitted_at=_whole(job.get("submit_time")) or None, eligible_at=_whole(job.get("eligible_time")) or None,
        started_at=None if state.waiting else starts,
        ended_at=None if state.waiting else (_whole(job.get("end_time")) or None),
        estimated_start=starts if state.waiting else None,
        time_limit_min=int(limit) if isinstance(limit, int) and limit < 2**31 else None,
        priority=int(priority) if isinstance(priority, int) else None,
        restarts=_whole(job.get("restart_cnt")), exit_code=code, exit_signal=ended_by, source="squeue",
    )  # fmt: skip


def _comment(value: Any) -> str:
    """A job's own comment; sacct's JSON, and some versions of squeue's, keep three in a record."""
    return str(value.get("job") or "") if isinstance(value, Mapping) else str(value or "")
