"""Watches a submitted run: its jobs from Slurm as rarely as will do, its state from them, its files and its router.

A poll is one query for all jobs of the run. While the router's beat moves there is none; else the first comes at once
and the next after 30 s, then ever more rarely up to five minutes, with a jitter so that many watchers do not ask in
step; a state that changed starts anew at 30 s. Why a job waits (fair-share, idle nodes) is asked for only while one
waits, at most once in five minutes. Where Slurm does not answer, the run's own files say what they know.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from conf.schema import Config
from launch.slurm import record, words
from launch.slurm.accounting import account, component_names, settle
from launch.slurm.client import open_client
from launch.slurm.client.commands import current_user
from launch.slurm.client.errors import SlurmError
from launch.slurm.client.protocol import FairShare, JobInfo, SiteInfo, SlurmClient
from launch.slurm.client.states import JobState
from launch.slurm.client.verdict import ABANDONED, Verdict, half_dead, verdict
from launch.slurm.record import Submission
from stages import beacon, sharedfs
from stages.layout import RunLayout
from stages.status import fetch_status

POLL_S: Final = 30.0
POLL_MAX_S: Final = 300.0
JITTER: Final = 0.5
"""A pause is up to this share longer."""
GROWTH: Final = 1.5
EXTRAS_S: Final = 300.0
"""How long fair-share and idle nodes count as known."""
HEARD_TTLS: Final = 2.0
"""Lease times for which a beat that moved says that the run is well."""


@dataclass
class Schedule:
    """When to ask Slurm next; pure, with the clock and the draw passed in."""

    pause_s: float = POLL_S
    next_at: float = 0.0

    def due(self, now: float, *, hearing: bool) -> bool:
        """Whether to ask now; while the run is heard of by other means the next question moves away."""
        if hearing:
            self.pause_s = POLL_S
            self.next_at = max(self.next_at, now + POLL_S)
            return False
        return now >= self.next_at

    def asked(self, now: float, draw: float, *, changed: bool) -> None:
        """Note a question; `draw` is a random number from 0 to 1."""
        self.pause_s = POLL_S if changed else min(POLL_MAX_S, self.pause_s * GROWTH)
        self.next_at = now + self.pause_s * (1 + JITTER * draw)


@dataclass
class Seen:
    """What Slurm last said of the run."""

    jobs: list[JobInfo] = field(default_factory=list)
    ids: frozenset[str] = frozenset()
    """Which jobs it was asked about."""
    asked_at: float | None = None
    error: str | None = None
    share: FairShare | None = None
    site: SiteInfo | None = None
    extras_at: float = float("-inf")


class RunWatch:
    """One run, for as long as somebody looks at it.

    Args:
        config: the run's.
        layout: its run directory.
        client: of Slurm; None: of the clusters where its jobs are.
        now: unix seconds.
        draw: a random number from 0 to 1.
    """

    def __init__(
        self,
        config: Config,
        layout: RunLayout,
        client: SlurmClient | None = None,
        *,
        now: Callable[[], float] = time.time,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._config, self._layout = config, layout
        self._given = client
        self._now, self._draw = now, draw
        self._schedule, self._seen = Schedule(), Seen()
        self._submissions: list[Submission] = []
        self._read_at = float("-inf")
        self._beat: tuple[int, int] | None = None
        self._beat_moved_at = float("-inf")

    async def status(self) -> dict[str, Any]:
        """The document of `status --json` with its `slurm` section and the state that all of it means.

        A run without submissions is a local one: Slurm is left alone.
        """
        submissions = await self._read()
        document = await fetch_status(self._layout.root)
        if not submissions:
            return document
        final = await asyncio.to_thread(sharedfs.exists, self._layout.summary)
        if final and document.get("state") in {"completed", "cancelled"}:
            return {**document, "slurm": await self._used(document, submissions)}
        if self._schedule.due(self._now(), hearing=await self._hears()):
            submissions = await self._read(anew=True)
            await self._ask(record.current(submissions))
        said = await self._verdict(document, submissions, final=final)
        section = {**_mapping(document.get("slurm")), **self._section(record.current(submissions), document)}
        return {**document, "state": said.state, "stuck": document.get("stuck") or said.reason, "slurm": section}

    async def _used(self, document: Mapping[str, Any], submissions: Sequence[Submission]) -> Mapping[str, Any]:
        """What a run that is over has used: from its summary, else from accounting and then put into the summary."""
        known = _mapping(document.get("slurm"))
        if known.get("settled"):
            return known
        completed = int(_mapping(document.get("rollouts")).get("completed") or 0)
        used = await account(self._client(submissions[-1]), submissions, completed)
        if used["settled"]:
            with contextlib.suppress(OSError):  # a reader who may not write there still gets the figures
                await asyncio.to_thread(settle, self._layout, used)
        return {**known, **used}

    def _client(self, submission: Submission) -> SlurmClient:
        return self._given if self._given is not None else open_client(submission.clusters)

    async def _read(self, *, anew: bool = False) -> list[Submission]:
        """The run's submissions; the directory is listed once in half a minute at most, and before every question."""
        if anew or self._now() - self._read_at >= POLL_S:
            self._submissions = await asyncio.to_thread(record.read, self._layout)
            self._read_at = self._now()
        return self._submissions

    async def _hears(self) -> bool:
        """Whether the router's beat has moved lately, as far as this watch has seen."""
        found = await asyncio.to_thread(beacon.read, self._layout)
        if found is None or found.ended:
            self._beat = None
            return False
        beat = (found.epoch, found.beat)
        if self._beat is not None and beat != self._beat:
            self._beat_moved_at = self._now()
        self._beat = beat
        return self._now() - self._beat_moved_at < HEARD_TTLS * self._config.lease.ttl_s

    async def _ask(self, newest: Sequence[Submission]) -> None:
        seen, before = self._seen, {job.job_id: job.state for job in self._seen.jobs}
        since = min(one.submitted_at for one in newest)
        user = await asyncio.to_thread(_owner, self._layout.root)
        try:
            jobs: list[JobInfo] = []
            for ids in record.by_clusters(newest).values():
                one = next(one for one in newest if one.job_id == ids[0])
                jobs += await self._client(one).jobs(ids, user=user, since=since)
            seen.jobs, seen.ids, seen.error = jobs, frozenset(one.job_id for one in newest), None
        except SlurmError as error:
            seen.error = str(error)
        now = seen.asked_at = self._now()
        self._schedule.asked(now, self._draw(), changed=before != {job.job_id: job.state for job in seen.jobs})
        if seen.error is None and any(job.state.waiting for job in seen.jobs):
            await self._ask_why(user, self._client(newest[-1]))

    async def _ask_why(self, user: str, client: SlurmClient) -> None:
        seen = self._seen
        if self._now() - seen.extras_at < EXTRAS_S:
            return
        seen.extras_at = self._now()
        waiting = next(job for job in seen.jobs if job.state.waiting)
        try:
            seen.share = await client.fair_share(user, waiting.account or None)
            seen.site = await client.site()
        except SlurmError as error:
            seen.error = str(error)

    async def _verdict(self, document: Mapping[str, Any], submissions: Sequence[Submission], *, final: bool) -> Verdict:
        own, seen = str(document.get("state") or "starting"), self._seen
        control = {one.job_id for one in record.current(list(submissions)) if one.control}
        if seen.error is None and seen.asked_at is not None and self._gone(control):
            if not final:
                return await self._forgotten(own, control)
            if own == "requeued":
                return Verdict("failed", ABANDONED)
        if final and own == "requeued" and not control <= seen.ids:  # a successor that Slurm was not asked about yet
            return Verdict(own)
        continued = submissions[-1].reason in {"continue", "resume"}
        return verdict(own, seen.jobs, control=control, final=final, continued=continued)

    def _gone(self, control: set[str]) -> bool:
        """Whether Slurm answered and knows nothing of the jobs that may hold the router."""
        if not control <= self._seen.ids:  # submitted since
            return False
        return not any(job.leader_id in control or not control for job in self._seen.jobs)

    async def _forgotten(self, own: str, control: set[str]) -> Verdict:
        """The controller knows every job that runs, so one that it does not know is over, unless its router beats on.

        That would be another cluster's controller, asked by mistake: the beat is then believed.
        """
        if self._beat is not None and await self._beats_on():
            return Verdict(own)
        ids = ", ".join(sorted(control))
        said = f"Slurm does not know job {ids} any more, and it left no result; `rollmill resume` carries the run on"
        return Verdict("failed", said)

    async def _beats_on(self) -> bool:
        """Whether the beat moves within two of its periods; looked at once for each answer that is in doubt."""
        before = self._beat
        for _ in range(4):
            await asyncio.sleep(self._config.lease.ttl_s / 10)
            if await self._hears():
                return True
            if self._beat != before:
                return self._beat is not None
        return False

    def _section(self, newest: Sequence[Submission], document: Mapping[str, Any]) -> dict[str, Any]:
        """The `slurm` key of the status document."""
        seen, names = self._seen, component_names(newest)
        known = sorted(seen.jobs, key=lambda job: (int(job.leader_id), job.het_offset or 0))
        jobs = [_job(job, names) for job in known]
        missing = [one for one in newest if one.job_id not in {job.leader_id for job in known}]
        jobs += [_unknown(one, document) for one in missing]
        lines = words.explain(known, seen.site, seen.share, components=names, now=self._now())
        held = {one.job_id for one in newest if one.reason == "fallback" and one.control}
        lines = [_held_back(line, held) for line in lines]
        if seen.error is not None:
            lines.append(f"Slurm could not be asked: {seen.error}; this is from the run's own files")
        broken = half_dead(known)
        if broken:
            lines.append(f"half of job {', '.join(broken)} is dead: `rollmill resume` cancels it and submits it again")
        share = seen.share
        return {
            "jobs": jobs,
            "fair_share": None if share is None else {
                "user": share.user, "account": share.account, "factor": share.factor, "share": share.share,
                "usage": share.usage,
            },
            "words": lines,
            "half_dead": bool(broken),
            "placement": newest[-1].placement,
            "source": known[0].source if known and seen.error is None else "files",
            "asked_at": seen.asked_at,
            "error": seen.error,
        }  # fmt: skip


def _job(job: JobInfo, names: Mapping[str, str]) -> dict[str, Any]:
    return {
        "job_id": job.job_id, "component": names.get(job.job_id, names.get(job.leader_id)), "state": job.state.value,
        "reason": job.reason, "nodes": list(job.nodes), "partition": job.partition, "account": job.account,
        "qos": job.qos, "priority": job.priority, "estimated_start": job.estimated_start, "restarts": job.restarts,
        "submitted_at": job.submitted_at, "started_at": job.started_at, "ends_at": job.ended_at,
        "time_limit_min": job.time_limit_min, "exit_code": job.exit_code, "exit_signal": job.exit_signal,
        "cluster": job.cluster, "source": job.source,
    }  # fmt: skip


def _unknown(one: Submission, document: Mapping[str, Any]) -> dict[str, Any]:
    """A job of which Slurm says nothing: what the run's own files say of it."""
    own = [item for item in document.get("members") or () if isinstance(item, Mapping)]
    nodes = sorted({str(item.get("node")) for item in own if str(item.get("slurm")) == one.job_id})
    return {
        "job_id": one.job_id, "component": ", ".join(one.components), "state": JobState.UNKNOWN.value, "reason": None,
        "nodes": nodes, "partition": None, "account": None, "qos": None, "priority": None, "estimated_start": None,
        "restarts": None, "submitted_at": round(one.submitted_at), "started_at": None, "ends_at": None,
        "time_limit_min": None, "exit_code": None, "exit_signal": None, "cluster": ",".join(one.clusters) or None,
        "source": "files",
    }  # fmt: skip


def _held_back(line: str, held: set[str]) -> str:
    """The job that placement=auto keeps for later is no trouble, and should not read like one."""
    if "BeginTime" in line and any(f"({one})" in line for one in held):
        return line.split(": BeginTime")[0] + ": it is held back, and runs only if the heterogeneous job waits too long"
    return line


def _owner(run_dir: Path) -> str:
    """Whose jobs these are: the owner of the run directory."""
    uid = os.stat(run_dir).st_uid  # noqa: PTH116 - not the file system's contents, but whose it is
    if uid == os.geteuid():
        return current_user()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
