"""Which commands are run, in which order, and what is made of answers and of silence."""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from pathlib import Path

import pytest

from launch.errors import LaunchError
from launch.slurm.client import open_client
from launch.slurm.client.commands import CommandClient, current_user
from launch.slurm.client.errors import SlurmRefused, SlurmUnavailable
from launch.slurm.client.runner import CommandRunner, Output, clean_environment
from launch.slurm.client.states import JobState
from tests.support import runs
from tests.support.waiting import eventually
from tests.unit.launch.slurm.client.slurms import FakeRunner, recorded, refused

DOWN = refused("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
NO_ACCOUNTS = refused("Slurm accounting storage is disabled")
UNKNOWN_ID = refused("slurm_load_jobs error: Invalid job id specified")


async def test_one_query_for_all_jobs_and_components() -> None:
    runner = FakeRunner(squeue=recorded("squeue-22.05.txt"))
    client = CommandClient(runner=runner)
    jobs = await client.jobs(["11+1", "11", "14"], user="alice")
    assert runner.calls == {"squeue": 1}
    (argv,) = runner.asked
    assert "--jobs=11,14" in argv
    assert "--user=alice" in argv
    assert "--states=all" in argv
    assert "--local" in argv
    assert {job.leader_id for job in jobs} >= {"11", "14"}


async def test_the_caller_is_the_user_unless_another_is_named() -> None:
    runner = FakeRunner(squeue="")
    await CommandClient(runner=runner).jobs(name="rollmill-x")
    assert f"--user={current_user()}" in runner.asked[0]
    assert "--name=rollmill-x" in runner.asked[0]


async def test_nothing_is_asked_about_nothing() -> None:
    runner = FakeRunner()
    assert await CommandClient(runner=runner).jobs([]) == []
    assert await CommandClient(runner=runner).accounting([], 0.0) == []
    await CommandClient(runner=runner).cancel([])
    assert not runner.calls


async def test_parity_b20_a_job_gone_from_squeue_is_found_in_accounting_of_any_day() -> None:
    runner = FakeRunner(squeue=UNKNOWN_ID, sacct=recorded("sacct-22.05.txt"))
    jobs = await CommandClient(runner=runner).jobs(["8"], user="alice", since=1795200000.0)
    assert {job.job_id: job.state for job in jobs}["8"] is JobState.FAILED
    assert "--starttime=2026-11-20T17:40:00" in runner.asked[1], "not from midnight"


async def test_parity_b20_without_accounting_scontrol_is_asked() -> None:
    runner = FakeRunner(squeue="", sacct=NO_ACCOUNTS, scontrol=recorded("scontrol-job-22.05.txt"))
    client = CommandClient(runner=runner)
    jobs = await client.jobs(["11"], user="alice")
    assert {job.source for job in jobs} == {"scontrol"}
    await client.jobs(["11"], user="alice")
    assert runner.calls == {"squeue": 2, "sacct": 1, "scontrol": 2}, "accounting that is off stays off"


async def test_parity_b20_a_job_that_nobody_knows_is_left_out() -> None:
    runner = FakeRunner(squeue="", sacct="", scontrol=UNKNOWN_ID)
    assert await CommandClient(runner=runner).jobs(["99"], user="alice") == []


async def test_without_a_controller_accounting_is_believed_but_not_about_the_end_of_what_may_return() -> None:
    text = recorded("sacct-22.05.txt")
    times = "2026-11-21T19:09:32||2026-11-21T19:09:33|2026-11-21T19:10:00"
    preempted = f"7|ci|PREEMPTED|0:0|cpu1|1|1|||{times}|5|1||p|q|a|alice|n\n"
    runner = FakeRunner(squeue=DOWN, sacct=text + preempted)
    states = {job.job_id: job.state for job in await CommandClient(runner=runner).jobs(["7", "8"], user="alice")}
    assert (states["7"], states["8"]) == (JobState.REQUEUED, JobState.FAILED)
    runner = FakeRunner(squeue="", sacct=preempted)
    (job,) = await CommandClient(runner=runner).jobs(["7"], user="alice")
    assert job.state is JobState.PREEMPTED, "the controller answers and does not know it: it is over"


async def test_when_nobody_answers_that_is_said() -> None:
    runner = FakeRunner(squeue=DOWN, sacct=refused("sacct: error: Problem talking to the database: Connection refused"),
                        )  # fmt: skip
    with pytest.raises(SlurmUnavailable, match=r"does not answer: .*Unable to contact slurm controller"):
        await CommandClient(runner=runner).jobs(["7"])


async def test_where_squeue_is_not_there_scontrol_may_be() -> None:
    runner = FakeRunner(
        squeue=SlurmUnavailable("squeue cannot be run here", no_command=True),
        sacct=NO_ACCOUNTS,
        scontrol=recorded("scontrol-job-22.05.txt"),
    )
    assert {job.source for job in await CommandClient(runner=runner).jobs(["11"], user="alice")} == {"scontrol"}


async def test_columns_that_this_slurm_has_not_are_asked_for_as_json() -> None:
    def answer(argv: object) -> str | Output:
        wants_json = "--json" in argv  # type: ignore[operator]
        return recorded("squeue-22.05.json") if wants_json else "error: Invalid job format specification: tres-alloc\n"

    runner = FakeRunner(squeue=answer)
    jobs = await CommandClient(runner=runner).jobs(["14"], user="alice")
    assert [job.job_id for job in jobs] == ["14"]
    assert runner.calls == {"squeue": 2}


async def test_parity_b25_clusters_reach_every_command() -> None:
    runner = FakeRunner(
        squeue="", sacct="", scontrol=refused("Invalid job id specified"), scancel="", sinfo="", sshare=""
    )
    client = CommandClient(["east", "west"], runner)
    await client.jobs(["7"], user="alice")
    await client.cancel(["7"])
    await client.signal("7", "USR2")
    await client.fair_share("alice")
    await client.accounting(["7"], 0.0)
    with pytest.raises(SlurmRefused):
        await client.requeue("7")
    runner.answers["scontrol"] = ""
    await client.site()
    both = {"squeue", "sacct", "scancel"}
    for argv in runner.asked:
        clusters = [word for word in argv if word.startswith("--clusters=")]
        allowed = ["--clusters=east,west"] if argv[0] in both else ["--clusters=east", "--clusters=west"]
        assert len(clusters) == 1
        assert clusters[0] in allowed, argv
    asked = [argv for argv in runner.asked if argv[0] == "scontrol" and "requeue" in argv]
    assert [argv[1] for argv in asked] == ["--clusters=east", "--clusters=west"], "scontrol takes one cluster"


async def test_cancelling_what_has_ended_is_no_error() -> None:
    said = "scancel: error: Kill job error on job id 9: Invalid job id specified"
    runner = FakeRunner(scancel=refused(said))
    client = CommandClient(runner=runner)
    await client.cancel(["9", "10"])
    await client.cancel(["9"], pending_only=True)
    assert runner.asked == [["scancel", "9", "10"], ["scancel", "--state=PENDING", "9"]]
    runner.answers["scancel"] = refused("scancel: error: Kill job error on job id 9: Access/permission denied")
    with pytest.raises(SlurmRefused, match=r"^scancel: Kill job error on job id 9: Access/permission denied$"):
        await client.cancel(["9"])


async def test_signals() -> None:
    runner = FakeRunner(scancel="")
    client = CommandClient(runner=runner)
    await client.signal("9", "USR2")
    await client.signal("9", "USR2", batch_only=True)
    assert runner.asked == [["scancel", "--signal=USR2", "9"], ["scancel", "--signal=USR2", "--batch", "9"]]
    runner.answers["scancel"] = UNKNOWN_ID
    with pytest.raises(SlurmRefused):
        await client.signal("9", "USR2")


async def test_no_accounts_is_no_usage_and_no_shares_is_none() -> None:
    client = CommandClient(runner=FakeRunner(sacct=NO_ACCOUNTS, sshare=refused("sshare: error: no associations")))
    assert await client.accounting(["9"], 0.0) is None
    assert await client.fair_share("alice") is None


@pytest.mark.parametrize(
    "said",
    ["Unable to contact slurm controller (connect failure)", "Socket timed out on send/recv operation",
     "Protocol authentication error", "sacct: error: Problem talking to the database: Connection refused",
     "fatal: Could not establish a configuration source"],
)  # fmt: skip
async def test_silence_is_told_from_refusal(said: str) -> None:
    client = CommandClient(runner=FakeRunner(scancel=refused(said), sacct=refused(said)))
    with pytest.raises(SlurmUnavailable) as caught:
        await client.cancel(["9"])
    assert caught.value.may_have_happened
    assert isinstance(caught.value, LaunchError)
    with pytest.raises(SlurmUnavailable) as caught:
        await client.accounting(["9"], 0.0)
    assert not caught.value.may_have_happened


def test_the_environment_cannot_change_what_a_command_prints() -> None:
    inside = {
        "PATH": "/bin", "HOME": "/h", "SLURM_CONF": "/c", "SLURM_JOB_ID": "7", "SLURM_CLUSTERS": "x",
        "SBATCH_QOS": "q",
        "SQUEUE_FORMAT": "%i", "SACCT_FORMAT": "x", "SINFO_FORMAT": "x", "SLURM_TIME_FORMAT": "relative",
        "TZ": "Asia/Tokyo",
        "LC_ALL": "de_DE", "SLURM_JWT": "t", "SLURM_BITSTR_LEN": "0",
    }  # fmt: skip
    assert clean_environment(inside) == {
        "PATH": "/bin", "HOME": "/h", "SLURM_CONF": "/c", "SLURM_JWT": "t", "LC_ALL": "C", "TZ": "UTC",
    }  # fmt: skip


def program(place: Path, text: str) -> dict[str, str]:
    """A PATH on which `squeue` is this shell script."""
    file = place / "squeue"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{place}:{os.environ['PATH']}"}


async def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    marks = tmp_path / "pids"
    environment = program(tmp_path, f"sleep 600 & echo $! $$ > {shlex.quote(str(marks))}; wait")
    runner = CommandRunner(1.5, environment)
    with pytest.raises(SlurmUnavailable, match=r"squeue did not answer within 1.5 s"):
        await runner.run(["squeue"])
    pids = [int(word) for word in marks.read_text().split()]
    assert len(pids) == 2
    await eventually(lambda: not runs.alive(pids), "both end")


async def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    runner = CommandRunner(environment={"PATH": str(tmp_path)})
    with pytest.raises(SlurmUnavailable, match=r"squeue cannot be run here.*PATH"):
        await CommandClient(runner=runner).jobs(["7"])


async def test_calls_are_counted_and_streams_told_apart(tmp_path: Path) -> None:
    runner = CommandRunner(environment=program(tmp_path, "echo out; echo 'squeue: error: bad' >&2; exit 3"))
    before = runner.calls["squeue"]
    output = await runner.run(["squeue"])
    assert output == Output(3, "out\n", "squeue: error: bad\n")
    assert output.said == "bad"
    assert runner.calls["squeue"] == before + 1


def test_pyslurm_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyslurm", None)
    with pytest.raises(SlurmUnavailable, match=r"pyslurm cannot be imported.*matches this site's Slurm"):
        open_client(backend="pyslurm")


def test_recorded_json_is_what_it_says() -> None:
    assert json.loads(recorded("squeue-22.05.json"))["meta"]["Slurm"]["release"] == "22.05.8"
