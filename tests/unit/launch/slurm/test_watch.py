"""How seldom Slurm is asked, and what the status document says with its answers and without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conf.load import digest, dump_config
from conf.schema import Config, Lease
from launch.cli import main
from launch.slurm import client as slurm_client
from launch.slurm import record
from launch.slurm.client.commands import current_user
from launch.slurm.client.errors import SlurmUnavailable
from launch.slurm.client.protocol import FairShare, JobInfo, JobUsage
from launch.slurm.client.states import JobState, job_state
from launch.slurm.watch import POLL_MAX_S, POLL_S, RunWatch, Schedule
from launch.verbs.status import slurm_lines
from stages import beacon, manifest, sharedfs
from stages.beacon import Beacon
from stages.layout import RunLayout
from stages.status import read_status
from tests.unit.launch.slurm.client.slurms import FakeSlurm


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    config = replace(Config(), run_dir=str(tmp_path / "run"), lease=Lease(ttl_s=1.0, heartbeat_s=0.2))
    layout = RunLayout(tmp_path / "run")
    manifest.open_run(layout, dump_config(config), digest(config), "test")
    return layout


@pytest.fixture
def submitted(layout: RunLayout) -> RunLayout:
    """A run of one heterogeneous job, 9, of two components."""
    note(layout, "9", "control", "run")
    return layout


def note(layout: RunLayout, job_id: str, *components: str, job: str = "het", **more: Any) -> None:
    one = record.Submission(
        name=f"rollmill-x-{job_id}", job=job, job_id=job_id, placement="het", components=list(components),
        submitted_at=999_000.0 + int(job_id), control="control" in components, **more,
    )  # fmt: skip
    record.add(layout, one)


def het(*states: str, **more: Any) -> list[JobInfo]:
    return [
        JobInfo(job_id=f"9+{n}", leader_id="9", het_offset=n, state=job_state(state), partition="cpu", **more)
        for n, state in enumerate(states)
    ]


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's port is blocked, and that is known at once: a real try takes three seconds."""

    async def from_files(run_dir: Path) -> dict[str, Any]:
        return read_status(RunLayout(run_dir))

    monkeypatch.setattr("launch.slurm.watch.fetch_status", from_files)


def watch(layout: RunLayout, client: FakeSlurm, clock: Clock | None = None) -> RunWatch:
    config = replace(Config(), run_dir=str(layout.root), lease=Lease(ttl_s=1.0, heartbeat_s=0.2))
    return RunWatch(config, layout, client, now=clock or Clock(), draw=lambda: 1.0)


def beat(layout: RunLayout, number: int, *, ended: bool = False) -> None:
    beacon.write(layout, Beacon(epoch=1, url="http://127.0.0.1:9", node="n", pid=1, beat=number, ended=ended, boot="b"))


def leave_summary(layout: RunLayout, state: str) -> None:
    rollouts = {"accepted": 4, "completed": 4, "failed": 0, "cancelled": 0, "open": 0}
    summary = {
        "run_id": "r",
        "state": state,
        "rollouts": rollouts,
        "slurm": {"attempts": 2},
        "stuck": None,
    }
    sharedfs.write_atomic(layout.summary, msgspec.json.encode(summary))


def test_pauses_grow_to_five_minutes_and_begin_anew_with_a_change() -> None:
    schedule, now, pauses = Schedule(), 0.0, []
    for _ in range(9):
        assert schedule.due(now, hearing=False)
        schedule.asked(now, 0.0, changed=False)
        assert not schedule.due(schedule.next_at - 0.1, hearing=False)
        pauses.append(schedule.next_at - now)
        now = schedule.next_at
    assert pauses[0] == POLL_S * 1.5
    assert pauses == sorted(pauses)
    assert pauses[-1] == POLL_MAX_S
    schedule.asked(now, 1.0, changed=True)
    assert schedule.next_at - now == POLL_S * 1.5, "30 s and the whole jitter"


def test_nothing_is_asked_while_the_run_is_heard_of() -> None:
    schedule = Schedule()
    schedule.asked(0.0, 0.0, changed=True)
    assert not any(schedule.due(float(now), hearing=True) for now in range(1000))
    assert not schedule.due(1010.0, hearing=False)
    assert schedule.due(1000.0 + POLL_S, hearing=False)


async def test_a_local_run_leaves_slurm_alone(layout: RunLayout) -> None:
    client = FakeSlurm(error=SlurmUnavailable("must not be asked"))
    status = await watch(layout, client).status()
    assert not client.calls
    assert (status["state"], status["slurm"]) == ("starting", {})


async def test_one_query_a_poll_and_none_between(submitted: RunLayout) -> None:
    client, clock = FakeSlurm(het("RUNNING", "RUNNING")), Clock()
    note(submitted, "10", "run", job="run+1")
    looking = watch(submitted, client, clock)
    for _ in range(20):
        await looking.status()
        clock.now += 1.0
    assert client.calls == {"jobs": 1}
    assert client.users == [current_user()]
    clock.now += 60.0
    await looking.status()
    assert client.calls == {"jobs": 2}


@pytest.mark.usefixtures("unreachable")
async def test_no_query_while_the_routers_beat_moves(submitted: RunLayout) -> None:
    client, clock = FakeSlurm(het("RUNNING", "RUNNING")), Clock()
    looking = watch(submitted, client, clock)
    for number in range(100):
        beat(submitted, number)
        status = await looking.status()
        clock.now += 1.0
    assert client.calls == {"jobs": 1}, "only the first, before the beat was seen to move"
    assert status["state"] == "starting", "no router answered, and the journal is empty"
    beat(submitted, 100, ended=True)
    client.known = het("CANCELLED", "CANCELLED")
    clock.now += 60.0
    assert (await looking.status())["state"] == "cancelled"


async def test_why_a_job_waits_is_asked_for_seldom_and_only_then(submitted: RunLayout) -> None:
    client, clock = FakeSlurm(het("PENDING", "PENDING", reason="Priority", priority=3847)), Clock()
    client.share = FairShare(user="alice", account="physics", factor=0.1)
    looking = watch(submitted, client, clock)
    status = await looking.status()
    assert status["state"] == "starting"
    section = status["slurm"]
    assert [(job["job_id"], job["component"], job["reason"]) for job in section["jobs"]] == [
        ("9+0", "control", "Priority"), ("9+1", "run", "Priority"),
    ]  # fmt: skip
    assert section["fair_share"]["factor"] == 0.1
    assert any("higher priority" in line for line in section["words"])
    assert (section["source"], section["asked_at"], section["half_dead"]) == ("squeue", clock.now, False)
    for _ in range(4):
        clock.now += 61.0
        await looking.status()
    assert client.calls["jobs"] > 1
    assert (client.calls["fair_share"], client.calls["site"]) == (1, 1)
    client.known = het("RUNNING", "RUNNING")
    clock.now += 1000.0
    await looking.status()
    assert client.calls["site"] == 1


async def test_a_scancelled_run_without_a_summary_is_cancelled(submitted: RunLayout) -> None:
    status = await watch(submitted, FakeSlurm(het("CANCELLED", "CANCELLED"))).status()
    assert (status["state"], status["stuck"]) == ("cancelled", None)


async def test_a_failed_job_fails_the_run_and_says_how(submitted: RunLayout) -> None:
    status = await watch(submitted, FakeSlurm(het("FAILED", "FAILED", exit_code=1))).status()
    assert status["state"] == "failed"
    assert "job 9+0 ended as failed, exit code 1" in status["stuck"]


async def test_requeued_and_half_dead(submitted: RunLayout) -> None:
    status = await watch(submitted, FakeSlurm(het("PENDING", "PENDING", restarts=1))).status()
    assert status["state"] == "requeued"
    assert status["slurm"]["jobs"][0]["restarts"] == 1
    status = await watch(submitted, FakeSlurm(het("PENDING", "FAILED"))).status()
    assert status["slurm"]["half_dead"] is True
    assert any("half of job 9 is dead" in line for line in status["slurm"]["words"])


async def test_an_oom_step_of_a_run_that_is_done_is_no_failure(submitted: RunLayout) -> None:
    leave_summary(submitted, "completed")
    client = FakeSlurm(het("OUT_OF_MEMORY", "OUT_OF_MEMORY"))
    status = await watch(submitted, client).status()
    assert status["state"] == "completed"
    assert not client.calls["jobs"], "the run's own record is enough"


async def test_what_a_run_used_is_put_into_its_summary_once_all_jobs_have_ended(submitted: RunLayout) -> None:
    leave_summary(submitted, "completed")
    client = FakeSlurm()
    common = {
        "leader_id": "9",
        "partition": "cpu",
        "started_at": 5,
        "elapsed_s": 3600,
        "cpus": 2,
        "gpus": 1,
        "nodes": 1,
    }
    parts = [
        JobUsage(job_id=f"9+{n}", het_offset=n, state=JobState.RUNNING, cpu_s=None, **common) for n in range(2)
    ]  # fmt: skip
    client.used = parts
    status = await watch(submitted, client).status()
    assert (status["slurm"]["settled"], status["slurm"]["pools"]["run"]["cpu_hours"]) == (False, 2.0)
    client.used = [msgspec.structs.replace(one, state=JobState.COMPLETED, cpu_s=1800.0) for one in parts]
    used = (await watch(submitted, client).status())["slurm"]
    assert used["pools"]["run"]["idle_share"] == 0.75
    assert used["total"]["cost_per_1000"] == {"cpu_hours": 1000.0, "gpu_hours": 500.0}
    assert msgspec.json.decode(sharedfs.read_bytes(submitted.summary))["slurm"] == used
    client.used = None
    assert (await watch(submitted, client).status())["slurm"] == used
    assert client.calls == {"accounting": 2}
    assert slurm_lines(used, 0.0)[-1] == (
        "used     all: 4.00 CPU-hours (75% idle), 2.00 GPU-hours; "
        "a thousand rollouts: 1000.00 CPU-hours, 500.00 GPU-hours"
    )


async def test_where_accounting_is_off_nothing_is_invented(submitted: RunLayout) -> None:
    leave_summary(submitted, "completed")
    client = FakeSlurm()
    client.used = None
    used = (await watch(submitted, client).status())["slurm"]
    assert (used["pools"], used["total"]) == (None, None)
    assert "keeps no accounts" in used["reason"]
    assert slurm_lines(used, 0.0) == []


async def test_a_failed_run_that_is_carried_on_waits_again(submitted: RunLayout) -> None:
    leave_summary(submitted, "failed")
    note(submitted, "12", "control", "run", reason="resume")
    job = JobInfo(job_id="12+0", leader_id="12", het_offset=0, state=job_state("PENDING"))
    status = await watch(submitted, FakeSlurm([job])).status()
    assert status["state"] == "requeued"
    assert status["slurm"]["attempts"] == 2


async def test_parity_b20_when_slurm_does_not_answer_the_files_do(submitted: RunLayout) -> None:
    member = {"kind": "router", "id": "router-1", "node": "cpu3", "pid": 1, "endpoint": None, "epoch": 1, "slurm": "9",
              "started_at": 1.0}  # fmt: skip
    sharedfs.write_atomic(submitted.member("router-1"), msgspec.json.encode(member))
    status = await watch(submitted, FakeSlurm(error=SlurmUnavailable("squeue: no answer"))).status()
    section = status["slurm"]
    assert section["source"] == "files"
    assert section["error"] == "squeue: no answer"
    assert [(job["job_id"], job["state"], job["nodes"]) for job in section["jobs"]] == [("9", "unknown", ["cpu3"])]
    assert any("Slurm could not be asked" in line for line in section["words"])
    assert status["state"] == "starting"


async def test_parity_b20_a_job_that_nobody_knows_any_more(submitted: RunLayout) -> None:
    status = await watch(submitted, FakeSlurm()).status()
    assert status["state"] == "failed"
    assert "does not know job 9 any more" in status["stuck"]
    leave_summary(submitted, "completed")
    assert (await watch(submitted, FakeSlurm()).status())["state"] == "completed"


@pytest.mark.usefixtures("unreachable")
async def test_another_clusters_controller_is_not_believed_against_a_beat(
    submitted: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter(range(1000))
    monkeypatch.setattr(beacon, "read", lambda _: Beacon(epoch=1, url="http://127.0.0.1:9", node="n", pid=1,
                                                         beat=next(numbers), boot="b"))  # fmt: skip
    status = await watch(submitted, FakeSlurm()).status()
    assert status["state"] == "starting", "what the files say"


async def test_a_fallback_that_is_held_back_is_no_trouble(submitted: RunLayout) -> None:
    note(submitted, "10", "control", job="control", reason="fallback")
    held = JobInfo(job_id="10", leader_id="10", state=job_state("PENDING"), reason="BeginTime")
    status = await watch(submitted, FakeSlurm([*het("RUNNING", "RUNNING"), held])).status()
    (line,) = [line for line in status["slurm"]["words"] if "(10)" in line]
    assert "held back, and runs only if the heterogeneous job waits too long" in line
    assert status["state"] == "starting"


def test_the_verb_shows_jobs_and_words(
    submitted: RunLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = FakeSlurm(het("PENDING", "PENDING", reason="Priority", priority=3847))
    client.share = FairShare(user="alice", account="physics", factor=0.1)
    monkeypatch.setattr("launch.slurm.watch.open_client", lambda _: client)
    assert main(["status", str(submitted.root)]) == 0
    out = capsys.readouterr().out
    assert "job      9+1 run: pending (Priority), partition cpu, priority 3847" in out
    assert out.count("slurm    fair-share factor 0.10 of 1 for alice in physics") == 1
    assert "slurm    control (9+0), run (9+1) wait: Priority" in out
    assert main(["status", "--json", str(submitted.root)]) == 0
    assert json.loads(capsys.readouterr().out)["slurm"]["jobs"][1]["component"] == "run"


def test_the_verb_does_not_touch_slurm_for_a_local_run(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("Slurm was asked")

    monkeypatch.setattr("launch.slurm.client.runner.CommandRunner.run", forbidden)
    assert main(["status", str(layout.root)]) == 0
    assert "job " not in capsys.readouterr().out
    assert slurm_client.open_client() is not None


def test_lines_for_people() -> None:
    job = {"job_id": "9", "component": "run", "state": "failed", "nodes": [f"n{n}" for n in range(6)], "exit_code": 3,
           "restarts": 2, "reason": "NonZeroExitCode"}  # fmt: skip
    waits = {"job_id": "10", "component": None, "state": "pending", "reason": "Priority", "estimated_start": 1090}
    share = {"user": "alice", "account": "physics", "factor": 0.25}
    assert slurm_lines({"jobs": [job, waits], "words": ["one"], "fair_share": share}, 1000.0) == [
        "job      9 run: failed, on n0, n1, n2, n3 and 2 more, restarts 2, exit code 3",
        "job      10 -: pending (Priority), starts in 1 min 30 s",
        "slurm    one",
        "slurm    fair-share factor 0.25 (alice, physics)",
    ]
