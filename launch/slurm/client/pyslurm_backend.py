"""The Slurm client over pyslurm: reads in a millisecond and no process a query, for sites that have built it.

pyslurm must match the site's libslurm to major and minor version, so it is an extra (`pip install rollmill[pyslurm]`)
that is imported here alone, and only where it was asked for: libslurm ends the whole process where it finds no
configuration. What it has no call for goes through the commands: several clusters, fair-share, what a site is, and jobs
that the controller has forgotten. Every name that is used of it is in USED, which a test looks for in its sources.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final, TypeVar

from launch.slurm.client import fields
from launch.slurm.client.commands import CommandClient, current_user
from launch.slurm.client.errors import SlurmRefused, SlurmUnavailable
from launch.slurm.client.protocol import FairShare, JobInfo, JobUsage, Partition, SiteInfo
from launch.slurm.client.states import job_state

USED: Final[dict[str, tuple[str, ...]]] = {
    "Jobs": ("load",),
    "Job": (
        "cancel", "requeue", "send_signal", "id", "heterogeneous_id", "heterogeneous_offset", "name", "user_name",
        "account", "partition", "qos", "cluster", "comment", "state", "state_reason", "allocated_nodes", "num_nodes",
        "cpus", "gpus", "submit_time", "eligible_time", "start_time", "end_time", "time_limit", "priority",
        "requeue_count", "exit_code", "exit_code_signal",
    ),
    "GPU": ("count",),
    "RPCError": ("msg",),
}  # fmt: skip
"""Attributes of pyslurm's classes that this module touches; their names are those of version 25.11.2."""

T = TypeVar("T")


class PyslurmClient:
    """See SlurmClient, whose methods these are."""

    def __init__(self, clusters: Sequence[str] = (), module: ModuleType | None = None) -> None:
        self._commands = CommandClient(clusters)
        self._elsewhere = bool(clusters)
        self._pyslurm: Any = module if module is not None else _import()

    async def jobs(
        self, ids: Sequence[str] = (), *, name: str | None = None, user: str | None = None, since: float | None = None
    ) -> list[JobInfo]:
        """See SlurmClient.jobs: one RPC for all; what the controller does not know is asked of accounting."""
        if self._elsewhere:
            return await self._commands.jobs(ids, name=name, user=user, since=since)
        wanted = list(dict.fromkeys(fields.job_ids(one)[0] for one in ids))
        if not wanted and name is None:
            return []
        everything = await self._call("Jobs.load", lambda: [_job(job) for job in self._pyslurm.Jobs.load().values()])
        who = current_user() if user is None else user
        found = [job for job in everything if _meant(job, wanted, name, who)]
        missing = [one for one in wanted if one not in {job.leader_id for job in found}]
        return found + (await self._commands.jobs(missing, user=user, since=since) if missing else [])

    async def cancel(self, ids: Sequence[str], *, pending_only: bool = False) -> None:
        """See SlurmClient.cancel; the command alone knows ids such as 9+1, and jobs by their state."""
        plain = [one for one in ids if one.isdigit() and not self._elsewhere and not pending_only]
        for one in plain:
            await self._call("Job.cancel", self._pyslurm.Job(int(one)).cancel)
        await self._commands.cancel([one for one in ids if one not in plain], pending_only=pending_only)

    async def signal(self, job_id: str, name: str, *, batch_only: bool = False) -> None:
        """See SlurmClient.signal."""
        if self._elsewhere or not job_id.isdigit():
            await self._commands.signal(job_id, name, batch_only=batch_only)
            return
        to = "batch" if batch_only else "children"
        job = self._pyslurm.Job(int(job_id))
        await self._call("Job.send_signal", lambda: job.send_signal(f"SIG{name.removeprefix('SIG')}", steps=to))

    async def requeue(self, job_id: str) -> None:
        """See SlurmClient.requeue."""
        if self._elsewhere or not job_id.isdigit():
            await self._commands.requeue(job_id)
            return
        await self._call("Job.requeue", self._pyslurm.Job(int(job_id)).requeue)

    async def partitions(self) -> tuple[Partition, ...]:
        """See SlurmClient.partitions."""
        return (await self.site()).partitions

    async def site(self) -> SiteInfo:
        """See SlurmClient.site."""
        return await self._commands.site()

    async def fair_share(self, user: str, account: str | None = None) -> FairShare | None:
        """See SlurmClient.fair_share."""
        return await self._commands.fair_share(user, account)

    async def accounting(self, ids: Sequence[str], since: float) -> list[JobUsage] | None:
        """See SlurmClient.accounting."""
        return await self._commands.accounting(ids, since)

    async def _call(self, what: str, call: Callable[[], T]) -> T:
        """Make a call of libslurm in a thread: it may wait for a controller that does not answer."""
        try:
            return await asyncio.to_thread(call)
        except self._pyslurm.RPCError as error:
            said = str(getattr(error, "msg", error))
            if "contact" in said.lower() or "timed out" in said.lower():
                raise SlurmUnavailable(f"pyslurm: no answer: {said}; see `scontrol ping`", command=what) from error
            raise SlurmRefused(f"pyslurm: {said}", command=what, said=said) from error


def _import() -> Any:
    try:
        return importlib.import_module("pyslurm")
    except ImportError as error:
        raise SlurmUnavailable(
            f"pyslurm cannot be imported ({error}): install the version that matches this site's Slurm, "
            "or leave it to Slurm's commands"
        ) from error


def _meant(job: JobInfo, ids: Sequence[str], name: str | None, user: str) -> bool:
    if ids and job.leader_id not in ids:
        return False
    return (name is None or job.name == name) and (not user or user.isdigit() or job.user == user)


def _job(job: Any) -> JobInfo:
    state = job_state(str(job.state))
    leader = job.heterogeneous_id or 0
    offset = (job.heterogeneous_offset or 0) if leader else None
    return JobInfo(
        job_id=f"{leader}+{offset}" if leader else str(job.id), leader_id=str(leader or job.id), het_offset=offset,
        name=job.name or "", user=job.user_name or "", account=job.account or "", partition=job.partition or "",
        qos=job.qos or "", cluster=job.cluster or "", comment=job.comment or "", state=state,
        reason=fields.text(job.state_reason) or None, nodes=fields.node_names(job.allocated_nodes),
        node_count=job.num_nodes or 0, cpus=job.cpus or 0, gpus=_gpus(job.gpus), submitted_at=job.submit_time,
        eligible_at=job.eligible_time, started_at=None if state.waiting else job.start_time,
        ended_at=None if state.waiting else job.end_time, estimated_start=job.start_time if state.waiting else None,
        time_limit_min=_whole(job.time_limit), priority=_whole(job.priority), restarts=job.requeue_count or 0,
        exit_code=job.exit_code or 0, exit_signal=job.exit_code_signal or 0, source="pyslurm",
    )  # fmt: skip


def _whole(value: Any) -> int | None:
    """A number, or None for the words that pyslurm has for "unlimited"."""
    return value if isinstance(value, int) else None


def _gpus(found: Any) -> int:
    """GPUs of all types together."""
    return sum(int(gpu.count or 0) for gpu in (found or {}).values())
