"""How a run goes on after one of its jobs: requeued, submitted again or over; and which of two placements stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from conf.schema import Config
from launch.errors import Exit, LaunchError
from launch.slurm import record
from launch.slurm.client import open_client
from launch.slurm.client.errors import SlurmError, SlurmUnavailable
from launch.slurm.client.protocol import JobInfo, ends_early
from launch.slurm.client.states import JobState
from launch.slurm.code import code_digest
from launch.slurm.own_job import own_submission
from launch.slurm.record import Submission
from launch.slurm.shapes import added_job, jobs_of
from stages.layout import RunLayout
from stages.summary import read_summary, summary_state, write_summary

SETTLE_S: Final = 1.0
"""After Slurm's SIGTERM until all components of a job that goes back whole are on their way."""
ASK_S: Final = 5.0
"""Patience with a question whose answer only says how much time there is."""
KILLED_S: Final = 120.0
"""How long a job that asked Slurm to requeue or cancel it waits for its own end."""


class Continuing:
    """What a job's leader asks of Slurm about its own job.

    Args:
        config: the run's.
        layout: its run directory.
        job: which job of the placement this is.
        ended: set when Slurm ends this job.
    """

    def __init__(self, config: Config, layout: RunLayout, job: str, ended: asyncio.Event | None = None) -> None:
        self._ended = ended if ended is not None else asyncio.Event()
        self._config, self._layout, self._job = config, layout, job
        self._job_id = os.environ.get("SLURM_HET_JOB_ID") or os.environ["SLURM_JOB_ID"]
        self._mine = own_submission(config, layout, job, self._job_id)
        self._client = open_client(self._mine.clusters)
        self._went_on: int | None = None

    @property
    def leads_run(self) -> bool:
        """Whether the router and the workflow run in this job."""
        return self._mine.control

    @property
    def is_added(self) -> bool:
        """Whether the run can do without this job: it was added to a pool later."""
        return self._mine.workers > 0

    @property
    def is_linked(self) -> bool:
        """Whether other components of the run are jobs of their own."""
        return self._mine.placement == "linked"

    def changed_code(self) -> str:
        """What to say where the code is not what this job was submitted with, or nothing. Blocking."""
        if self._mine.code in ("", code_digest()):
            return ""
        return f"{self._layout.root}: the code changed after job {self._job_id} was submitted"

    def missing_components(self) -> str:
        """What of a heterogeneous job did not come (back), or nothing."""
        wanted, there = len(self._mine.components), int(os.environ.get("SLURM_HET_SIZE", "1"))
        return f"only {there} of {wanted} components came" if there < wanted else ""

    # -- while the job runs -------------------------------------------------------------------------------------------

    async def seconds_left(self) -> float | None:
        """Until Slurm ends the job: its time limit, or the end of a preemption's grace; None where it does not say."""
        try:
            async with asyncio.timeout(ASK_S):
                mine = [job for job in await self._client.jobs([self._job_id]) if job.het_offset in (None, 0)]
        except (SlurmError, TimeoutError):
            return None
        return mine[0].ended_at - time.time() if mine and mine[0].ended_at else None

    async def is_preempted(self) -> bool:
        """Whether Slurm takes the job away before its time: in a preemption's grace it names an end before the limit's.

        Without `preempt_send_user_signal` Slurm sends TERM to the steps alone when the grace begins, and nothing to the
        batch shell before it ends (seen on 22.05).
        """
        try:
            async with asyncio.timeout(ASK_S):
                jobs = await self._client.jobs([self._job_id])
        except (SlurmError, TimeoutError):
            return False
        return any(ends_early(job) for job in jobs if job.state is JobState.RUNNING)

    async def submit_ahead(self) -> None:
        """Have the successor in the queue before anything else: a grace may be shorter than what there is to end."""
        if self._config.cluster.continue_by == "resubmit" and self._went_on is None:
            self._went_on = await self.go_on()

    async def lost_component(self, step: str) -> str | None:
        """Why a component of this heterogeneous job is gone, where Slurm and not the program ended it.

        Empty where Slurm takes the whole job away: it queues it again by itself, and ends this process in a moment.
        """
        if len(self._mine.components) < 2:
            return None
        try:
            jobs = await self._client.jobs([self._job_id])
        except SlurmError:
            return None
        gone = [job for job in jobs if not job.state.holds_nodes]
        if not gone:
            return None
        if any(job.het_offset == 0 and job.state.waiting for job in jobs):  # this very component, which still runs
            return ""
        said = ", ".join(f"{self._component(job)} ({job.job_id}) is {job.state.value}" for job in gone)
        return f"half of the job is gone: {said}"

    async def torn(self) -> str:
        """What of a heterogeneous job that Slurm ends goes back into the queue without the rest, or nothing."""
        if len(self._mine.components) < 2:
            return ""
        await asyncio.sleep(SETTLE_S)
        try:
            jobs = await self._client.jobs([self._job_id])
        except SlurmError:
            return ""
        back, left = [job for job in jobs if job.state.waiting], [job for job in jobs if job.state is JobState.RUNNING]
        if not back or not left:
            return ""
        return f"only {', '.join(map(self._component, back))} of the job would come back"

    def _component(self, job: JobInfo) -> str:
        return self._mine.components[job.het_offset or 0]

    async def end_rivals(self) -> str:
        """placement=auto: of the heterogeneous job and the linked ones, the first to start is the run; the other goes.

        Where both start within a moment the heterogeneous one stays: the held-back job takes it away only while it
        waits. Returns why this job is not the run, or nothing.
        """
        if self._mine.forgotten:
            return "another job of the run started before"
        submissions = await asyncio.to_thread(record.read, self._layout)
        rivals = [one for one in record.current(submissions) if one.control and one.job_id != self._job_id]
        if not rivals:
            return ""
        ids, held_back = [one.job_id for one in rivals], self._mine.reason == "fallback"
        if not held_back:
            await self._cancel(rivals)
        else:
            if await self._any_runs(rivals):
                return f"the heterogeneous job {', '.join(ids)} has started"
            from launch.slurm.submit import run_id_of, submit_rest

            run_id = await asyncio.to_thread(run_id_of, self._layout)
            try:
                made = await asyncio.to_thread(submit_rest, self._config, self._layout, run_id, self._mine)
            except LaunchError as error:
                return f"the heterogeneous job {', '.join(ids)} waits on, for there are no linked jobs: {error}"
            await self._cancel(rivals, pending_only=True)
            say(f"the heterogeneous job waited too long: linked jobs {', '.join(one.job_id for one in made)} instead")
        # Last: a leader that dies before this does all of it again, and nothing twice.
        for one in rivals:
            await asyncio.to_thread(record.forget, self._layout, one)
        return ""

    async def _any_runs(self, submissions: Sequence[Submission]) -> bool:
        try:
            asked = record.by_clusters(submissions).items()
            jobs = [job for clusters, ids in asked for job in await open_client(clusters).jobs(ids)]
            return any(job.state.holds_nodes for job in jobs)
        except SlurmError as error:
            names = ", ".join(one.job_id for one in submissions)
            say(f"whether {names} has started is not known, so this job goes on: {error}")
            return False

    # -- when it has ended --------------------------------------------------------------------------------------------

    def was_cut_short(self, code: int) -> bool:
        """Whether a driver that was asked to hand over has left work that another start can do. Blocking."""
        return code == Exit.REQUEUED or (code > 128 and summary_state(self._layout) != "cancelled")

    async def fail(self, why: str) -> None:
        """End the run without a driver: the jobs that wait are taken away, those that run read it in the summary."""
        await asyncio.to_thread(_leave_failure, self._layout, why)
        await self.finish(Exit.WRONG)

    async def go_on(self) -> int:
        """Let the run go on in another start of this job; returns the exit code of this one."""
        if self._went_on is not None:
            return self._went_on
        if not await self._may_go_on():
            return Exit.FAILED
        if self._config.cluster.continue_by == "none":
            say("cluster.continue_by=none: `rollmill resume` carries the run on")
            await self._end_companions()
            return Exit.REQUEUED
        if self._config.cluster.continue_by == "requeue":
            try:
                await self._client.requeue(self._job_id)
            except SlurmError as error:
                if isinstance(error, SlurmUnavailable) and error.may_have_happened:
                    await self._ended_within(ASK_S)  # Slurm may have ended the command with this very job
                    if self._ended.is_set():
                        return Exit.REQUEUED
                say(f"no requeue ({error}): submitting again instead")
            else:
                return await self._wait_for_the_end(Exit.REQUEUED)
        return await self._submit_after("continue")

    async def submit_again(self, why: str) -> int:
        """End what is left of this job and submit it anew under the same run."""
        say(f"{why}: submitting the whole job again")
        if not await self._may_go_on():
            return Exit.FAILED
        # What Slurm has already put back into its queue may stay there, and is ended by the successor when that starts.
        code = await self._submit_after("continue", after=False)
        await self._cancel([self._mine])
        return await self._wait_for_the_end(code)

    async def _may_go_on(self) -> bool:
        again = record.continued(await asyncio.to_thread(record.read, self._layout), self._job)
        times = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + again
        most = self._config.cluster.max_requeues
        if times < most:
            return True
        why = (
            f"the run went on {times} times, as often as cluster.max_requeues={most} allows; `rollmill resume` goes on"
        )
        say(why)
        if self._mine.control:
            await asyncio.to_thread(_leave_failure, self._layout, why)
        await self._end_companions()
        return False

    async def end_predecessor(self) -> None:
        """Cancel what is left of the job that this one was submitted in place of, where some of its nodes were lost."""
        # Its submitter may have noted it only now: what this job made of itself before does not say why it is there.
        mine = await asyncio.to_thread(record.find, self._layout, self._mine.name) or self._mine
        if mine.reason != "continue":
            return
        submissions = await asyncio.to_thread(record.read, self._layout)
        earlier = [one for one in submissions if one.job == self._job and one.job_id != self._job_id]
        await self._cancel(earlier[-1:])

    async def _submit_after(self, reason: str, *, after: bool = True) -> int:
        """Submit this job's successor; with `after` it may start when this one has ended."""
        placement: Any = self._mine.placement
        job = next((job for job in jobs_of(self._config, placement) if job.name == self._job), None)
        if job is None:  # an added job is not asked for again: the pool's own goes on
            return Exit.REQUEUED
        # Submission brings submitit along, which a leader that only starts its steps does not wait for.
        from launch.slurm.submit import run_id_of, submit_job

        try:
            run_id = await asyncio.to_thread(run_id_of, self._layout)
            made = await asyncio.to_thread(
                submit_job, self._config, self._layout, run_id, job, placement, reason,
                options=[f"--dependency=afterany:{self._job_id}"] if after else [], code=self._mine.code,
            )  # fmt: skip
        except LaunchError as error:
            say(f"the run cannot go on by itself: {error}; `rollmill resume` carries it on")
            await self._end_companions()
            return Exit.FAILED
        say(f"goes on as job {made.job_id}")
        return Exit.REQUEUED

    async def finish(self, code: int) -> int:
        """The driver has ended for good: take away what still waits in the queue, and say how it ended.

        A cancelled run's jobs cancel themselves, so that accounting calls them what they are.
        """
        cancelled = code == Exit.INTERRUPTED and await asyncio.to_thread(summary_state, self._layout) == "cancelled"
        await self._end_companions(pending_only=not cancelled)
        await self._end_headless()
        if not cancelled:
            return code
        await self._cancel([self._mine])
        return await self._wait_for_the_end(code)

    async def _end_companions(self, *, pending_only: bool = True) -> None:
        """Cancel the run's other jobs when nothing carries it on: one that waits would start for nobody."""
        submissions = record.current(await asyncio.to_thread(record.read, self._layout))
        others = [one for one in submissions if one.job_id != self._job_id]
        if self._mine.control and others:
            await self._cancel(others, pending_only=pending_only)

    async def _end_headless(self) -> None:
        """Cancel linked jobs that lost a node, superseded and added ones too: they may have lost their batch shell."""
        if not self._mine.control or self._mine.placement != "linked":
            return
        submissions = await asyncio.to_thread(record.read, self._layout)
        some = [one for one in submissions if one.placement == "linked" and self._nodes(one) > 1]
        wanted = {one.job_id: self._nodes(one) for one in some}
        for clusters, ids in record.by_clusters(some).items():
            try:
                jobs = await open_client(clusters).jobs(ids)
            except SlurmError:
                continue
            running = [job for job in jobs if job.state is JobState.RUNNING]
            less = {job.leader_id for job in running if 0 < job.node_count < wanted.get(job.leader_id, 0)}
            await self._cancel([one for one in some if one.job_id in less])

    def _nodes(self, one: Submission) -> int:
        """How many nodes a linked job was given; 0 where the configuration has no such job."""
        if one.workers:
            pool: Any = one.components[0].partition("+")[0]
            return added_job(self._config, pool, one.workers, one.first).nodes
        return next((job.nodes for job in jobs_of(self._config, "linked") if job.name == one.job), 0)

    async def _cancel(self, submissions: Sequence[Submission], *, pending_only: bool = False) -> None:
        for clusters, ids in record.by_clusters(submissions).items():
            try:
                await open_client(clusters).cancel(ids, pending_only=pending_only)
            except SlurmError as error:
                say(f"could not cancel {', '.join(ids)}: {error}")

    async def _wait_for_the_end(self, code: int) -> int:
        """Slurm is about to end this job: an exit before it says so would be recorded in place of its verdict."""
        await self._ended_within(KILLED_S)
        return code

    async def _ended_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()


def _leave_failure(layout: RunLayout, why: str) -> None:
    """Say in the summary that the run has failed and why, also where no driver has left one."""
    from stages.status import read_status  # brings HTTP along, which the leader of a healthy run never needs

    found = read_summary(layout)
    summary = found if found is not None else {**read_status(layout), "members": []}
    write_summary(layout, {**summary, "state": "failed", "stuck": why, "error": why})


def say(text: str) -> None:
    """A line in the batch output, with its time."""
    sys.stderr.write(f"rollmill leader: {time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()
