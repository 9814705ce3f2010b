"""Jobs of a run without a Slurm: steps that are shell scripts, submissions that are noted, and a scripted client."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conf.load import digest, dump_config
from conf.schema import Checkpoint, Cluster, Config, Lease, Placement
from launch.slurm import continuing, executor, record
from launch.slurm.client.errors import SlurmRefused
from launch.slurm.client.protocol import JobInfo, Partition
from launch.slurm.client.states import JobState, job_state
from launch.slurm.errors import SubmissionError
from launch.slurm.executor import Submitted
from launch.slurm.leader import Leader
from launch.slurm.record import Submission
from launch.slurm.shapes import Job
from stages import manifest
from stages.layout import RunLayout
from tests.support.waiting import eventually
from tests.unit.launch.slurm.client.slurms import FakeSlurm

HET = ("control", "init", "run", "eval", "fleet")
ASKERS = ("continuing", "run_over", "submit", "standing", "cancelling", "elastic")
"""Modules of launch.slurm that open a client of their own."""


class ScriptedSlurm(FakeSlurm):
    """Knows jobs, obeys commands at once, and remembers what it was told to do, in order."""

    def __init__(self, jobs: Sequence[JobInfo] = ()) -> None:
        super().__init__(jobs)
        self.told: list[tuple[Any, ...]] = []
        self.refuses: set[str] = set()
        self.parts: tuple[Partition, ...] = ()

    async def cancel(self, ids: Sequence[str], *, pending_only: bool = False) -> None:
        self._do("cancel", tuple(ids), "pending" if pending_only else "all")
        self.known = [
            msgspec.structs.replace(job, state=JobState.CANCELLED)
            if job.leader_id in ids and not job.state.ended and (job.state.waiting or not pending_only)
            else job
            for job in self.known
        ]

    async def requeue(self, job_id: str) -> None:
        self._do("requeue", job_id)

    async def signal(self, job_id: str, name: str, *, batch_only: bool = False) -> None:
        self._do("signal", job_id, name)

    async def partitions(self) -> tuple[Partition, ...]:
        self._do("partitions")
        return self.parts

    def _do(self, what: str, *about: Any) -> None:
        self._count(what)
        self.told.append((what, *about))
        if what in self.refuses:
            raise SlurmRefused(f"{what}: this job may not", said="this job may not")


class Sbatches:
    """Stands for sbatch: ids from 100, and what each submission asked for beyond its shape."""

    def __init__(self) -> None:
        self.made: list[tuple[str, list[str]]] = []
        self.nice: list[int | None] = []
        self.refused: set[str] = set()
        self.excluded: list[str] = []

    def submit(self, job: Job, config: Config, *, name: str, **_: Any) -> Submitted:
        self.made.append((job.name, list(config.cluster.extra_sbatch)))
        self.nice.append(config.cluster.nice)
        self.excluded = list(config.cluster.exclude)
        if job.name in self.refused:
            raise SubmissionError(f"Slurm refused {job.name}", refused=True)
        script = RunLayout(config.run_path).slurm / f"{name}.sh"
        return Submitted(name, str(99 + len(self.made)), None, script)


class JobSide:
    """A run and the Slurm around it, as the leader of one of its jobs finds them."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, placement: str, **cluster: Any) -> None:
        self.config = replace(
            Config(), run_dir=str(place), action="submit", checkpoint=Checkpoint(turns=0),
            lease=Lease(ttl_s=1.0, heartbeat_s=0.2), cluster=Cluster(**cluster),
            placement=Placement(name=placement),  # type: ignore[arg-type]
        )  # fmt: skip
        self.layout = RunLayout(place)
        manifest.open_run(self.layout, dump_config(self.config), digest(self.config), "test")
        self.slurm, self.sbatch = ScriptedSlurm(), Sbatches()
        for module in ASKERS:
            monkeypatch.setattr(f"launch.slurm.{module}.open_client", lambda _clusters: self.slurm)
        monkeypatch.setattr(executor, "submit", self.sbatch.submit)
        monkeypatch.setattr(continuing, "KILLED_S", 0.0)
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            monkeypatch.delenv(name)
        self.environment = monkeypatch

    def is_job(self, job_id: str, **facts: str) -> None:
        """From here on this process is that job's batch process; `facts` are further SLURM_ variables."""
        for name, value in {"JOB_ID": job_id, **facts}.items():
            self.environment.setenv(f"SLURM_{name}", value)

    def note(self, job_id: str, job: str = "het", components: Sequence[str] = (), **more: Any) -> Submission:
        """Note down a submission, by default that of the heterogeneous job."""
        components = list(components or (HET if job == "het" else (job.partition("+")[0],)))
        placement = "het" if job == "het" else "linked"
        given = {"placement": placement, "control": "control" in components, "submitted_at": 1000.0 + int(job_id)}
        one = Submission(name=f"rollmill-x-{job_id}", job=job, job_id=job_id, components=components,
                         **{**given, **more})  # fmt: skip
        record.add(self.layout, one)
        return one

    def step(self, name: str, *, drain: str = "exit 75", stop: str = "exit 0", first: str = ":") -> str:
        """A step's line: it does `first`, then hears words until one ends it."""
        script = (
            f'echo "$ROLLMILL_CODE_CHANGED" > $1/up-$2; {first}; while read -r word; do echo $word >> $1/said-$2; '
            f"case $word in drain) {drain};; stop) {stop};; esac; done; exit 9"
        )
        return shlex.join(["sh", "-c", script, "launch.slurm.step", str(self.layout.root), name])

    def steps(self, *names: str, **scripts: str) -> list[str]:
        """Lines of steps that do as they are told; `scripts` are the first deeds of some."""
        return [self.step(name, first=scripts.get(name, ":")) for name in names]

    def start(self, job: str, lines: Sequence[str], signal_s: int = 90) -> asyncio.Task[int]:
        """Start the job's leader."""
        return asyncio.create_task(Leader(self.layout, job, "\n".join(lines), signal_s).run())

    async def lead(self, job: str, lines: Sequence[str], signal_s: int = 90) -> int:
        """The leader's exit code."""
        async with asyncio.timeout(60):
            return await self.start(job, lines, signal_s)

    async def are_up(self, *names: str) -> None:
        """Wait until these steps have begun: the leader's signal handlers are there by then."""
        await eventually(lambda: all((self.layout.root / f"up-{name}").exists() for name in names), "steps are up")

    def told(self, name: str) -> list[str]:
        """The words that a step has heard."""
        path = self.layout.root / f"said-{name}"
        return path.read_text().split() if path.exists() else []

    def summary(self) -> dict[str, Any]:
        """report/summary.json; empty where there is none."""
        path = self.layout.summary
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def leave_summary(self, state: str) -> None:
        """What the driver leaves at its end."""
        self.layout.summary.write_text(json.dumps({"state": state, "stuck": None}))


def summarized(state: str, code: int) -> str:
    """A driver's end, as a step's deed."""
    return f"""printf '{{"state":"{state}"}}' > $1/report/summary.json; exit {code}"""


def het(*states: str, job_id: str = "9") -> list[JobInfo]:
    """A heterogeneous job whose components are in these states."""
    return [
        JobInfo(job_id=f"{job_id}+{n}", leader_id=job_id, het_offset=n, state=job_state(state))
        for n, state in enumerate(states)
    ]


def plain(job_id: str, state: str, **more: Any) -> JobInfo:
    """An ordinary job."""
    return JobInfo(job_id=job_id, leader_id=job_id, state=job_state(state), **more)
