"""Public bugs of the field in reading Slurm: states, forgotten jobs, too many calls, clusters, rules of het jobs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.slurm import executor, record
from launch.slurm.checks import check
from launch.slurm.client.commands import CommandClient
from launch.slurm.client.protocol import JobInfo
from launch.slurm.client.states import JobState, job_state
from launch.slurm.client.verdict import verdict
from launch.slurm.sbatch import Sbatch
from launch.slurm.shapes import jobs_of
from launch.slurm.watch import RunWatch
from stages import beacon
from stages.beacon import Beacon
from stages.status import read_status
from tests.bench.slurm_calls import PER_ESTIMATE, PER_STEP, PER_SUBMISSION
from tests.unit.launch.slurm.client.slurms import FakeRunner, refused
from tests.unit.launch.slurm.configs import RUN_ID, make
from tests.unit.launch.slurm.conftest import Sides
from tests.unit.launch.slurm.leaders import JobSide, het
from tests.unit.launch.slurm.sites import Nodes, site

NO_ACCOUNTS = refused("Slurm accounting storage is disabled")
UNKNOWN_ID = refused("slurm_load_jobs error: Invalid job id specified")
BAD = ("TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "DEADLINE", "BOOT_FAIL", "FAILED")


def in_accounting(job_id: str, state: str, code: str = "1:0") -> str:
    """sacct's line of a job that ended yesterday."""
    times = "2026-11-20T19:09:32||2026-11-20T19:09:33|2026-11-20T23:10:00"
    return f"{job_id}|ci|{state}|{code}|cpu1|1|1|||{times}|5|1||p|q|a|alice|n\n"


@pytest.fixture
def submitted(side: Sides, monkeypatch: pytest.MonkeyPatch) -> JobSide:
    """A run of one job, 9, submitted before midnight; no router answers."""

    async def from_files(run_dir: Path) -> dict[str, Any]:
        return read_status(made.layout)

    made = side("linked")
    made.note("9", "control", submitted_at=1795200000.0)
    monkeypatch.setattr("launch.slurm.watch.fetch_status", from_files)
    return made


async def state_of(made: JobSide, runner: FakeRunner) -> tuple[str, str]:
    status = await RunWatch(made.config, made.layout, CommandClient(runner=runner)).status()
    return status["state"], str(status["stuck"])


# ---- B20: accounting off, a job gone from the queue, midnight


async def test_b20_a_job_gone_from_the_queue_is_found_in_accounting_of_the_day_of_its_submission(
    submitted: JobSide,
) -> None:
    runner = FakeRunner(squeue=UNKNOWN_ID, sacct=in_accounting("9", "TIMEOUT", "0:0"))
    state, why = await state_of(submitted, runner)
    assert state == "failed" and "job 9 reached its time limit" in why
    (since,) = [word for word in runner.asked[1] if word.startswith("--starttime=")]
    assert since == "--starttime=2026-11-20T17:40:00", "not from last midnight"


async def test_b20_without_accounting_the_controller_and_the_runs_files_say_it(submitted: JobSide) -> None:
    gone = FakeRunner(squeue="", sacct=NO_ACCOUNTS, scontrol=UNKNOWN_ID)
    state, why = await state_of(submitted, gone)
    assert state == "failed" and "does not know job 9 any more" in why
    submitted.layout.summary.write_text('{"state": "completed", "stuck": null}')
    assert (await state_of(submitted, FakeRunner(sacct=NO_ACCOUNTS)))[0] == "completed", (
        "its own record says how it ended"
    )


async def test_b20_where_nobody_answers_the_run_is_not_declared_dead(submitted: JobSide) -> None:
    down = refused("error: Unable to contact slurm controller (connect failure)")
    silent = FakeRunner(squeue=down, sacct=refused("Problem talking to the database: Connection refused"))
    assert (await state_of(submitted, silent))[0] == "starting"


# ---- B21: calls are bounded


SQUEUE = 2
"""What one squeue costs slurmctld, as measured on 22.05: jobs and partitions."""


async def test_b21_a_whole_run_costs_its_submission_and_its_steps(side: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submission, leader and end of a heterogeneous job: one sbatch, and not one question however long it runs."""
    monkeypatch.setattr("launch.slurm.submit.places", lambda _: [])
    from launch.slurm.submit import place

    made = side("het")
    place(made.config, made.layout, "r", "launch")
    assert [name for name, _ in made.sbatch.made] == ["het"]
    made.is_job("100", HET_SIZE="5")
    names = ("control", "init", "run", "eval", "fleet")
    assert await made.lead("het", made.steps(*names, control="exit 0")) == 0
    commands = len(made.sbatch.made) + made.slurm.calls.total()
    steps = PER_STEP * len(names)  # allocation, creation and end of each srun are Slurm's own
    assert commands <= PER_SUBMISSION
    assert commands + steps <= PER_SUBMISSION + (PER_STEP + PER_ESTIMATE) * len(names)


@pytest.mark.parametrize("heard", [True, False])
async def test_b21_an_hour_of_watching_is_bounded(side: Sides, monkeypatch: pytest.MonkeyPatch, heard: bool) -> None:
    """Half a call a minute, with a router that is heard and with one that is not."""

    async def from_files(run_dir: Path) -> dict[str, Any]:
        return {"state": "running", "members": [], "slurm": {}, "stuck": None}

    monkeypatch.setattr("launch.slurm.watch.fetch_status", from_files)
    made = side("het")
    made.note("9")
    made.slurm.known = het("RUNNING", "RUNNING")
    now, read = [1_000_000.0], record.read
    listed: list[float] = []
    monkeypatch.setattr(record, "read", lambda layout: (listed.append(now[0]), read(layout))[1])
    beats = iter(range(10_000))
    shown = Beacon(epoch=1, url="http://127.0.0.1:9", node="n", pid=1)
    moving = lambda _: Beacon(epoch=1, url="http://127.0.0.1:9", node="n", pid=1, beat=next(beats))  # noqa: E731
    monkeypatch.setattr(beacon, "read", moving if heard else lambda _: shown)
    watch = RunWatch(made.config, made.layout, made.slurm, now=lambda: now[0], draw=lambda: 0.5)
    for _ in range(1800):
        assert (await watch.status())["state"] == "running"
        now[0] += 2.0
    assert made.slurm.calls["jobs"] * SQUEUE <= 0.5 * 60
    assert made.slurm.calls["jobs"] <= (1 if heard else 15)
    assert len(listed) <= 3600 / 30 + made.slurm.calls["jobs"] + 1, "the directory is not listed in a loop either"


# ---- B22: every state is what it is


@pytest.mark.parametrize("word", BAD)
def test_b22_no_end_is_taken_for_completed(word: str) -> None:
    for said in (word, word.lower(), f"{word} by 1001", [word]):
        assert job_state(said).value == word.lower()
    job = JobInfo(job_id="9", leader_id="9", state=job_state(word))
    assert job.state.ended and job.state is not JobState.COMPLETED
    found = verdict("running", [job])
    assert found.state == "failed" and found.reason is not None and "job 9" in found.reason


@pytest.mark.parametrize("word", ["NEW_STATE_OF_SLURM_30", "", "COMPLETED+NEW_FLAG"])
def test_b22_what_nobody_knows_is_no_end(word: str) -> None:
    assert not job_state(word).ended
    job = JobInfo(job_id="9", leader_id="9", state=job_state(word))
    assert verdict("running", [job]).state == "running"


@pytest.mark.parametrize("word", BAD)
async def test_b22_accounting_says_it_and_status_shows_it(submitted: JobSide, word: str) -> None:
    runner = FakeRunner(squeue=UNKNOWN_ID, sacct=in_accounting("9", word))
    assert (await state_of(submitted, runner))[0] == "failed"


def test_b22_an_out_of_memory_step_of_a_run_that_is_done_is_no_failure() -> None:
    assert verdict("completed", het("OUT_OF_MEMORY", "COMPLETED"), final=True).state == "completed"


# ---- B23: preempted and running again


async def test_b23_status_shows_one_job_with_one_restart_more(side: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    async def from_files(run_dir: Path) -> dict[str, Any]:
        return {"state": "running", "members": [], "slurm": {}, "stuck": None}

    monkeypatch.setattr("launch.slurm.watch.fetch_status", from_files)
    made, now = side("linked"), [1_000_000.0]
    made.note("9", "control")
    watch = RunWatch(made.config, made.layout, made.slurm, now=lambda: now[0], draw=lambda: 0.0)
    seen = []
    for state, restarts in (("RUNNING", 0), ("REQUEUED", 1), ("PENDING", 1), ("RUNNING", 1)):
        made.slurm.known = [JobInfo(job_id="9", leader_id="9", state=job_state(state), restarts=restarts)]
        status = await watch.status()
        (job,) = status["slurm"]["jobs"]
        seen.append((status["state"], job["job_id"], job["restarts"]))
        now[0] += 400.0
    assert seen == [("running", "9", 0), ("requeued", "9", 1), ("requeued", "9", 1), ("running", "9", 1)]


async def test_b23_accountings_two_records_are_one_job_with_two_attempts() -> None:
    both = in_accounting("9", "PREEMPTED", "0:0") + in_accounting("9", "RUNNING", "0:0")
    runner = FakeRunner(squeue=UNKNOWN_ID, sacct=both)
    (job,) = await CommandClient(runner=runner).jobs(["9"], user="alice")
    assert (job.state, job.restarts) == (JobState.RUNNING, 1)


# ---- B25: several clusters


async def test_b25_clusters_reach_every_command_of_a_run() -> None:
    runner = FakeRunner(
        squeue="", sacct="", scontrol="JobId=7 JobName=x JobState=RUNNING\n", scancel="", sinfo="", sshare=""
    )
    client = CommandClient(["east"], runner)
    await client.jobs(["7"], user="alice")
    await client.cancel(["7"])
    await client.cancel(["7"], pending_only=True)
    await client.signal("7", "USR2")
    await client.requeue("7")
    await client.fair_share("alice")
    await client.accounting(["7"], 0.0)
    await client.partitions()
    assert {argv[0] for argv in runner.asked} == {"squeue", "sacct", "scancel", "scontrol", "sshare"}
    assert all("--clusters=east" in argv for argv in runner.asked), runner.asked


def test_b25_clusters_are_in_the_batch_script_and_in_the_search_for_a_lost_submission() -> None:
    config = make("cluster.clusters=[east,west]")
    for placement in ("het", "linked", "colocated"):
        for job in jobs_of(config, placement):  # type: ignore[arg-type]
            text = executor.text(job, config, run_id=RUN_ID, name="n")
            assert text.count("#SBATCH --clusters=east,west") == len(job.components)
    asked: list[list[str]] = []
    answers = iter([None, "41\n42\n"])

    def command(argv: list[str], timeout_s: float) -> Any:
        asked.append(argv)
        if argv[0] == "sbatch":
            return subprocess.CompletedProcess(argv, 1, "", "sbatch: error: Socket timed out on send/recv operation")
        return subprocess.CompletedProcess(argv, 0, next(answers, "41\n42\n") or "", "")

    assert Sbatch(["east"], run=command, sleep=lambda _: None).submit(Path("x.sh"), "n")[0] == "41"
    others = [argv for argv in asked if argv[0] != "sbatch"]
    assert {argv[0] for argv in others} == {"squeue", "scancel"}
    assert all("--clusters=east" in argv for argv in others)


async def test_b25_a_runs_own_modules_ask_its_clusters(side: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    from launch.slurm import cancelling, continuing, standing, watch

    made = side("linked", clusters=["east"])
    made.is_job("9")
    made.note("9", "control", clusters=["east"])
    opened: list[Sequence[str]] = []
    for module in (cancelling, continuing, standing, watch):
        monkeypatch.setattr(module, "open_client", lambda clusters: (opened.append(list(clusters)), made.slurm)[1])
    continuing.Continuing(made.config, made.layout, "control")
    await RunWatch(made.config, made.layout).status()
    await standing.live_jobs(made.config, record.read(made.layout))
    await cancelling.cancel_jobs(made.layout.root)
    assert opened == [["east"]] * 4


# ---- B26: Slurm's rules of heterogeneous jobs


@pytest.mark.parametrize("option", ["--array=0-3", "-a 0-3", "-a0-3"])
def test_b26_an_array_with_a_het_job_is_refused_and_the_way_out_named(option: str) -> None:
    config = make(f"cluster.extra_sbatch=['{option}']")
    (found,) = [one for one in check(config, jobs_of(config, "het")) if one.fatal]
    assert found.message.startswith(f"cluster.extra_sbatch[0] got '{option}'")
    assert "sweep with -m" in found.message and "rollmill scale" in found.message


def test_b26_het_partitions_that_overlap_are_refused_where_nodes_are_short() -> None:
    config = make("cluster.partition=cpu", "pools.run.partition=other")
    short, enough = (site(Nodes("cpu", count, 8, 16000, ("cpu", "other"))) for count in (4, 5))
    (found,) = [one for one in check(config, jobs_of(config, "het"), short) if one.fatal]
    assert "needs 5 nodes" in found.message and "there are 4" in found.message
    assert re.search(r"placement=colocated or linked|other partitions", found.message)
    assert not [one for one in check(config, jobs_of(config, "het"), enough) if one.fatal]
    assert not [one for one in check(config, jobs_of(config, "linked"), short) if one.fatal]
