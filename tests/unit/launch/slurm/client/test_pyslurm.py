"""The pyslurm backend against what its sources name, and against a module of exactly those names."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launch.slurm.client.errors import SlurmRefused, SlurmUnavailable
from launch.slurm.client.protocol import JobInfo
from launch.slurm.client.pyslurm_backend import USED, PyslurmClient
from launch.slurm.client.states import JobState
from tests.unit.launch.slurm.client.slurms import FakeRunner

VERSION = "25.11.2"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of pyslurm from the package index.

    They cannot be built where libslurm is of another version. uv unpacks them into its cache before it tries to, and
    the try ends at once without build isolation, for setuptools is not there.
    """
    place = tmp_path_factory.mktemp("pyslurm")
    uv = shutil.which("uv") or str(Path(sys.prefix) / "bin" / "uv")
    cache, into = place / "cache", place / "into"
    argv = [
        uv, "pip", "install", "--quiet", "--python", sys.executable, "--cache-dir", str(cache), "--target", str(into),
        "--no-deps", "--no-build-isolation", "--no-binary", "pyslurm", f"pyslurm=={VERSION}",
    ]  # fmt: skip
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    found = [path.parent for path in cache.glob(f"sdists-*/**/{VERSION}/*/src/pyslurm/version.py")]
    assert found, f"no sources of pyslurm {VERSION} from the package index: {ended.stderr.strip()}"
    return found[0]


def class_body(text: str, name: str) -> str:
    """The text of a (cdef) class, to the next thing at the left margin."""
    match = re.search(rf"^(?:cdef )?class {name}\b.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"pyslurm has no class {name}"
    return match[0]


@pytest.mark.parametrize(("name", "attributes"), USED.items())
def test_every_name_that_is_used_is_in_pyslurms_sources(sources: Path, name: str, attributes: tuple[str, ...]) -> None:
    files = {"Jobs": "core/job/job.pyx", "Job": "core/job/job.pyx", "GPU": "db/tres.pyx", "RPCError": "core/error.pyx"}
    body = class_body((sources / files[name]).read_text(), name)
    missing = [
        one for one in attributes if not re.search(rf"^    def {one}\(|^        self\.{one} = ", body, re.MULTILINE)
    ]
    assert missing == []
    exported = (sources / "__init__.py").read_text()
    assert name == "GPU" or re.search(rf"^(?:from .* import|   ) {name}\b", exported, re.MULTILINE)


def test_the_arguments_are_pyslurms_too(sources: Path) -> None:
    body = class_body((sources / "core/job/job.pyx").read_text(), "Job")
    assert 'def send_signal(self, signal, steps="children", hurry=False):' in body
    assert "def requeue(self, hold=False):" in body
    assert "def cancel(self):" in body
    assert "def load(preload_passwd_info=False, frozen=False):" in (sources / "core/job/job.pyx").read_text()


class FakePyslurm(ModuleType):
    """pyslurm as far as USED says, over a few jobs."""

    def __init__(self) -> None:
        super().__init__("pyslurm")
        fake = self
        self.done: list[tuple[object, ...]] = []
        self.error: Exception | None = None
        self.loads = 0

        class RPCError(Exception):
            def __init__(self, msg: str) -> None:
                super().__init__(msg)
                self.msg = msg

        class Job:
            def __init__(self, job_id: int) -> None:
                self.id = job_id

            def _do(self, *what: object) -> None:
                if fake.error is not None:
                    raise fake.error
                fake.done.append((self.id, *what))

            def cancel(self) -> None:
                self._do("cancel")

            def requeue(self, hold: bool = False) -> None:
                self._do("requeue", hold)

            def send_signal(self, signal: str, steps: str = "children", hurry: bool = False) -> None:
                self._do("signal", signal, steps)

        class Jobs:
            @staticmethod
            def load() -> dict[int, Any]:
                fake.loads += 1
                if fake.error is not None:
                    raise fake.error
                return {job.id: job for job in fake.jobs()}

        self.RPCError, self.Job, self.Jobs = RPCError, Job, Jobs

    def jobs(self) -> Iterator[Any]:
        common = {
            "name": "rollmill-x", "user_name": "alice", "account": "physics", "partition": "gpu", "qos": "normal",
            "cluster": "ci", "comment": "rm-x", "state_reason": "None", "num_nodes": 2, "cpus": 4, "eligible_time": 90,
            "submit_time": 90, "start_time": 100, "end_time": 400, "time_limit": 5, "priority": 10, "requeue_count": 1,
            "exit_code": None, "exit_code_signal": None, "heterogeneous_id": None, "heterogeneous_offset": None,
            "gpus": {}, "allocated_nodes": None,
        }  # fmt: skip
        component = {**common, "heterogeneous_id": 9, "state": "RUNNING", "allocated_nodes": "gpu[1-2]"}
        gpus = {"gpu:fake": SimpleNamespace(count=4)}
        waits = {"state": "PENDING", "state_reason": "Priority", "time_limit": "UNLIMITED", "start_time": None}
        for number, more in (
            (9, {**component, "heterogeneous_offset": 0}), (10, {**component, "heterogeneous_offset": 1, "gpus": gpus}),
            (11, {**common, **waits}),
            (12, {**common, "state": "FAILED", "exit_code": 3, "exit_code_signal": 9, "user_name": "bob"}),
        ):  # fmt: skip
            assert {*more, "id"} <= set(USED["Job"])
            yield SimpleNamespace(id=number, **more)


@pytest.fixture
def fake() -> FakePyslurm:
    return FakePyslurm()


@pytest.fixture
def client(fake: FakePyslurm, monkeypatch: pytest.MonkeyPatch) -> PyslurmClient:
    monkeypatch.setattr(
        "launch.slurm.client.commands.CommandRunner", lambda: FakeRunner(squeue="", sacct="", scancel="")
    )
    return PyslurmClient(module=fake)


async def test_jobs_with_their_components_in_one_call(client: PyslurmClient, fake: FakePyslurm) -> None:
    jobs = {job.job_id: job for job in await client.jobs(["9", "11", "9+1"], user="alice")}
    assert fake.loads == 1
    assert jobs["9+1"] == JobInfo(
        job_id="9+1", leader_id="9", het_offset=1, name="rollmill-x", user="alice", account="physics", partition="gpu",
        qos="normal", cluster="ci", comment="rm-x", state=JobState.RUNNING, nodes=("gpu1", "gpu2"), node_count=2,
        cpus=4, gpus=4, submitted_at=90, eligible_at=90, started_at=100, ended_at=400, time_limit_min=5, priority=10,
        restarts=1, source="pyslurm",
    )  # fmt: skip
    assert (jobs["11"].het_offset, jobs["11"].time_limit_min, jobs["11"].reason) == (None, None, "Priority")
    (other,) = await client.jobs(["12"], user="bob")
    assert (other.state, other.exit_code, other.exit_signal) == (JobState.FAILED, 3, 9)
    assert await client.jobs(["12"], user="alice") == []
    assert {job.job_id for job in await client.jobs(name="rollmill-x", user="alice")} == {"9+0", "9+1", "11"}


async def test_cancel_signal_and_requeue(client: PyslurmClient, fake: FakePyslurm) -> None:
    await client.cancel(["9", "12+1"])
    await client.cancel(["11"], pending_only=True)
    await client.signal("9", "USR2")
    await client.signal("9", "SIGUSR2", batch_only=True)
    await client.requeue("9")
    assert fake.done == [
        (9, "cancel"), (9, "signal", "SIGUSR2", "children"), (9, "signal", "SIGUSR2", "batch"), (9, "requeue", False),
    ]  # fmt: skip


async def test_its_errors_are_ours(client: PyslurmClient, fake: FakePyslurm) -> None:
    fake.error = fake.RPCError("Invalid job id specified")
    with pytest.raises(SlurmRefused, match="pyslurm: Invalid job id specified"):
        await client.requeue("9")
    fake.error = fake.RPCError("Unable to contact slurm controller (connect failure)")
    with pytest.raises(SlurmUnavailable, match="no answer"):
        await client.jobs(["9"])


async def test_several_clusters_are_left_to_the_commands(fake: FakePyslurm, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(squeue="", sacct="", scontrol="", scancel="")
    monkeypatch.setattr("launch.slurm.client.commands.CommandRunner", lambda: runner)
    client = PyslurmClient(["east"], module=fake)
    await asyncio.gather(client.jobs(["9"]), client.cancel(["9"]), client.signal("9", "USR2"), client.requeue("9"))
    assert (fake.loads, fake.done) == (0, [])
    assert all("--clusters=east" in argv for argv in runner.asked)
