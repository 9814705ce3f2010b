"""Slurms for tests: recorded outputs of real commands, and a client that answers as it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from launch.slurm.client.errors import SlurmError
from launch.slurm.client.protocol import FairShare, JobInfo, JobUsage, SiteInfo
from launch.slurm.client.runner import Output

RECORDED = Path(__file__).parent / "recorded"
"""What Slurm's commands printed for jobs of alice on a real cluster; each file is named for its command and version."""

Answer = Output | Exception | str


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


class FakeRunner:
    """Answers each command by name; keeps what was asked."""

    def __init__(self, **answers: Answer | Callable[[Sequence[str]], Answer]) -> None:
        self.calls: Counter[str] = Counter()
        self.asked: list[list[str]] = []
        self.answers = answers

    async def run(self, argv: Sequence[str], *, changes: bool = False) -> Output:
        self.calls[argv[0]] += 1
        self.asked.append(list(argv))
        answer = self.answers[argv[0]]
        if callable(answer):
            answer = answer(argv)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Output) else Output(0, answer, "")


def refused(said: str) -> Output:
    return Output(1, "", said)


class FakeSlurm:
    """A SlurmClient that knows these jobs, or raises; counts what it is asked."""

    def __init__(self, jobs: Sequence[JobInfo] = (), *, error: SlurmError | None = None) -> None:
        self.known, self.error = list(jobs), error
        self.calls: Counter[str] = Counter()
        self.users: list[str | None] = []
        self.share: FairShare | None = None
        self.at: SiteInfo | None = None
        self.used: list[JobUsage] | None = []

    def _count(self, what: str) -> None:
        self.calls[what] += 1
        if self.error is not None:
            raise self.error

    async def jobs(
        self, ids: Sequence[str] = (), *, name: str | None = None, user: str | None = None, since: float | None = None
    ) -> list[JobInfo]:
        self.users.append(user)
        self._count("jobs")
        return [job for job in self.known if job.leader_id in ids or job.name == name]

    async def cancel(self, ids: Sequence[str], *, pending_only: bool = False) -> None:
        self._count("cancel")

    async def signal(self, job_id: str, name: str, *, batch_only: bool = False) -> None:
        self._count("signal")

    async def requeue(self, job_id: str) -> None:
        self._count("requeue")

    async def site(self) -> SiteInfo:
        self._count("site")
        return self.at or SiteInfo(cluster="c", version=(22, 5), partitions=(), nodes=())

    async def fair_share(self, user: str, account: str | None = None) -> FairShare | None:
        self._count("fair_share")
        return self.share

    async def accounting(self, ids: Sequence[str], since: float) -> list[JobUsage] | None:
        self._count("accounting")
        return self.used
