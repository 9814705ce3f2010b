"""Linked jobs come and go apart: one that ended for good fails the run, one that does nothing any more is replaced."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

from conf.schema import Config
from launch.errors import LaunchError
from launch.kinds import ORPHAN_TTLS
from launch.slurm import record
from launch.slurm.client import open_client
from launch.slurm.client.errors import SlurmError
from launch.slurm.client.protocol import JobInfo, SlurmClient
from launch.slurm.client.states import JobState
from launch.slurm.record import Submission
from launch.slurm.shapes import Job, jobs_of
from stages import control
from stages.layout import RunLayout

ASK_S: Final = 300.0
"""Between two questions: a pool may wait in the queue for hours."""
LOST_S: Final = 60.0
"""The same about a job that was there: Slurm may need a minute and more to call a node lost (SlurmdTimeout)."""


class PoolWatch:
    """Looks at a linked run from its driver: fails it when a component that it needs has ended for good.

    A job of several nodes outlives the loss of one (`--no-kill`). Where that one held the batch shell, which is the
    first, nobody is left who ends the job: it is submitted anew, and cancelled when its successor starts, or at once
    where none of its processes is heard any more.

    Args:
        config: the run's.
        layout: its run directory.
        client: of Slurm; None: by each submission's own cluster.
    """

    def __init__(self, config: Config, layout: RunLayout, client: SlurmClient | None = None) -> None:
        self._config, self._layout, self._given = config, layout, client
        self._jobs = {job.name: job for job in jobs_of(config, "linked") if job.name != "control"}
        self._missing_since: dict[str, float] = {}
        self._came: set[str] = set()
        self._kinds: set[str] = set()
        self._any: set[str] = set()
        self._asked: dict[str, float] = {}
        self._owed: set[str] = set()

    async def look(self, status: Mapping[str, Any]) -> None:
        """Ask rarely about a job, and only where the processes of its first node are missing for long."""
        now, wall = time.monotonic(), time.time()
        there = {name for name, job in self._jobs.items() if self._is_there(job, status)}
        self._came |= there
        self._any = {name for name, job in self._jobs.items() if self._is_there(job, status, node=None)}
        self._kinds = {str(member.get("kind")) for member in status["members"]}
        if any(replica.get("state") == "ready" for replica in status["fleet"]):
            self._kinds.add("fleet")
        for name in self._jobs:
            if name in there:
                self._missing_since.pop(name, None)
            else:
                self._missing_since.setdefault(name, now)
        if not status["rollouts"]["open"]:
            return
        long = {name: wall - (now - since) for name, since in self._missing_since.items() if self._is_long(name, now)}
        if long:
            self._asked.update(dict.fromkeys(long, now))
            await self._ask(long)

    def _is_there(self, job: Job, status: Mapping[str, Any], node: int | None = 0) -> bool:
        """Whether any process of a node of the job, by default its first, takes part in the run; None: of any node."""
        shares = [share for step in job.steps for share in step.shares]
        mine = {
            f"{share.kind}-{number}"
            for share in shares
            for number in (share.all_numbers if node is None else share.numbers_on(node))
        }
        there = [str(member.get("id")) for member in status["members"]]
        there += [str(replica.get("id")) for replica in status["fleet"] if replica.get("state") == "ready"]
        return any(one.rpartition("-")[0] in mine for one in there)

    def _is_long(self, name: str, now: float) -> bool:
        lost = name in self._came and self._jobs[name].no_kill
        patience_s = ORPHAN_TTLS * self._config.lease.ttl_s if lost else self._config.stuck_after_s
        pause_s = LOST_S if lost else ASK_S
        return now - self._missing_since[name] >= patience_s and now - self._asked.get(name, -pause_s) >= pause_s

    async def _ask(self, missing: Mapping[str, float]) -> None:
        """Act on what Slurm says of these jobs; the figures are unix seconds since when nothing of them is there."""
        try:
            submissions = record.current(await asyncio.to_thread(record.read, self._layout))
        except OSError:
            return  # a network filesystem may answer the next time
        mine = {one.job_id: one for one in submissions if one.job in missing and one.placement == "linked"}
        for clusters, ids in record.by_clusters(mine.values()).items():
            client = self._given if self._given is not None else open_client(clusters)
            try:
                jobs = await client.jobs(ids, since=min(one.submitted_at for one in submissions))
                for job in jobs:
                    one = mine.get(job.leader_id)
                    if one is not None:
                        await self._judge(client, one, job, missing)
            except (SlurmError, OSError):
                continue  # it may answer the next time

    async def _judge(self, client: SlurmClient, one: Submission, job: JobInfo, missing: Mapping[str, float]) -> None:
        if one.job_id in self._owed:
            await self._replace(one)
            return
        if job.state.ended:
            resubmits = self._config.cluster.continue_by == "resubmit"
            if resubmits and job.state.may_return and one.job not in self._kinds:
                # Its leader went with its node, or had no time: nobody else submits its successor.
                _say(f"job {job.job_id} ({one.job}) is {job.state.value}: submitted anew")
                await self._replace(one)
            elif one.job not in self._kinds:  # added workers of the pool may be there without it
                await self._fail(f"component {one.job} will not come: its job {job.job_id} is {job.state.value}")
            return
        # One that Slurm has started anew since then has not had its time yet; nor, perhaps, engines that load for long.
        idle = job.state is JobState.RUNNING and job.started_at is not None and job.started_at < missing[one.job]
        silent = one.job not in self._any and (one.job in self._came or one.job != "fleet")
        if idle and self._jobs[one.job].no_kill and (silent or 0 < job.node_count < self._jobs[one.job].nodes):
            _say(f"job {job.job_id} ({one.job}) has lost the node of its batch shell: submitted anew")
            if silent:
                await client.cancel([one.job_id])
            await self._replace(one)  # which, where workers on other nodes go on, ends them when it starts

    async def _replace(self, one: Submission) -> None:
        from launch.slurm.submit import run_id_of, submit_job

        self._owed.add(one.job_id)  # until it has a successor: files may fail in between
        most = self._config.cluster.max_requeues
        again = record.continued(await asyncio.to_thread(record.read, self._layout), one.job)
        if again >= most:
            await self._fail(f"component {one.job} was lost {again + 1} times; cluster.max_requeues={most}")
            return
        try:
            run_id = await asyncio.to_thread(run_id_of, self._layout)
            job = self._jobs[one.job]
            made = await asyncio.to_thread(
                submit_job, self._config, self._layout, run_id, job, "linked", "continue", code=one.code
            )
        except LaunchError as error:
            await self._fail(f"component {one.job} is gone and cannot be submitted anew: {error}")
            return
        self._owed.discard(one.job_id)
        _say(f"{one.job} goes on as job {made.job_id}")
        self._came.discard(one.job)

    async def _fail(self, message: str) -> None:
        await asyncio.to_thread(control.request, self._layout.root, "fail", message)


def _say(text: str) -> None:
    sys.stderr.write(f"rollmill: {text}\n")
