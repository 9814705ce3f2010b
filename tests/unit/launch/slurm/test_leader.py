"""The batch process of a job: what becomes of the run when its steps end, its signals come, or half of it is gone."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from conf.load import dump_config
from launch.drive import Driver
from launch.slurm import leader, record
from launch.slurm.client.protocol import JobInfo
from launch.slurm.code import CODE_CHANGED, code_digest
from stages import control
from tests.support import runs
from tests.support.waiting import eventually
from tests.unit.launch.slurm.conftest import Sides
from tests.unit.launch.slurm.leaders import HET, JobSide, het, plain, summarized


@pytest.fixture
def one(side: Sides) -> JobSide:
    """A heterogeneous job, 9, whose leader this is."""
    made = side("het")
    made.is_job("9", HET_SIZE="5")
    made.note("9")
    return made


def signalled(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


# ---- the driver ends by itself


@pytest.mark.parametrize("code", [0, 1, 2, 137])
async def test_the_drivers_end_is_the_jobs_and_the_other_steps_are_stopped(one: JobSide, code: int) -> None:
    assert await one.lead("het", one.steps("control", "run", control=f"sleep 0.1; exit {code}")) == code
    assert one.told("run") == ["stop"]
    assert one.slurm.told == [] and one.sbatch.made == []


async def test_linked_jobs_that_still_wait_are_taken_away_at_the_end(side: Sides) -> None:
    made = side("linked")
    made.is_job("9")
    made.note("9", "control")
    made.note("10", "run")
    assert await made.lead("control", made.steps("control", control=summarized("completed", 0))) == 0
    assert made.slurm.told == [("cancel", ("10",), "pending")]


async def test_a_linked_job_that_a_lost_node_left_without_its_batch_shell_is_ended(side: Sides) -> None:
    made = side("linked")
    pools = replace(made.config.pools, run=replace(made.config.pools.run, nodes=2))
    (made.layout.root / "config.yaml").write_text(dump_config(replace(made.config, pools=pools)))
    made.is_job("9")
    made.note("9", "control")
    made.note("10", "run")
    made.note("11", "eval")
    made.slurm.known = [plain("10", "RUNNING", node_count=1), plain("11", "RUNNING", node_count=1)]
    assert await made.lead("control", made.steps("control", control=summarized("completed", 0))) == 0
    assert made.slurm.told == [("cancel", ("10", "11"), "pending"), ("cancel", ("10",), "all")]


async def test_a_persons_drain_ends_the_job_and_nothing_goes_on_by_itself(one: JobSide) -> None:
    deed = f"touch {one.layout.root}/began; while [ ! -e $1/control/drain.json ]; do sleep 0.01; done; exit 75"
    leading = one.start("het", one.steps("control", "run", control=deed))
    await one.are_up("control")
    control.request(one.layout.root, "drain")
    assert await leading == 75
    assert one.slurm.told == [] and one.sbatch.made == []


async def test_a_cancelled_runs_jobs_cancel_themselves(one: JobSide) -> None:
    one.note("10", "run+1", workers=2)
    assert await one.lead("het", one.steps("control", "run", control=summarized("cancelled", 130))) == 130
    assert one.slurm.told == [("cancel", ("10",), "all"), ("cancel", ("9",), "all")]


# ---- a component ends


async def test_the_driver_is_told_of_a_component_that_died(one: JobSide) -> None:
    log = one.layout.attempt_logs(1) / "run-node0.log"
    waits = "while [ ! -e $1/control/fail.json ]; do sleep 0.01; done; exit 1"
    dies = f"echo 'rollmill: run-1: no sandbox here' > {log}; exit 3"
    assert await one.lead("het", one.steps("control", "run", control=waits, run=dies)) == 1
    assert control.message(one.layout, "fail") == "component run ended with exit code 3: run-1: no sandbox here"


async def test_a_step_that_dies_before_the_others_have_begun_is_noticed(one: JobSide) -> None:
    waits = "while [ ! -e $1/control/fail.json ]; do sleep 0.01; done; exit 1"
    lines = one.steps("run", "init", "eval", "fleet", "control", run="exit 3", control=waits)
    assert await one.lead("het", lines) == 1
    assert "component run ended" in (control.message(one.layout, "fail") or "")


async def test_half_a_job_is_drained_and_all_of_it_submitted_again(one: JobSide) -> None:
    one.slurm.known = het("RUNNING", "RUNNING", "CANCELLED", "RUNNING", "RUNNING")
    assert await one.lead("het", one.steps("control", "init", "run", run="sleep 0.1; exit 137")) == 75
    assert one.told("control") == ["drain"] and "drain" in one.told("init")
    assert one.sbatch.made == [("het", [])]
    assert one.slurm.told == [("cancel", ("9",), "all")]
    assert [(sub.job_id, sub.reason) for sub in record.read(one.layout)] == [("9", "launch"), ("100", "continue")]


async def test_a_component_that_did_not_come_back_is_no_start(one: JobSide) -> None:
    one.is_job("9", HET_SIZE="3")
    assert await one.lead("het", one.steps("control")) == 75
    assert one.sbatch.made == [("het", [])]
    assert one.slurm.told == [("cancel", ("9",), "all")]
    assert not (one.layout.root / "up-control").exists()


async def test_steps_that_began_are_ended_when_another_cannot_be_started(one: JobSide) -> None:
    line = one.step("run", first="echo $$ > $1/pid").replace("sh -c", "/nowhere/srun -c", 1)
    with pytest.raises(FileNotFoundError):
        await one.lead("het", [one.step("control", first="echo $$ > $1/pid"), line])
    pid = one.layout.root / "pid"
    assert not pid.exists() or not runs.alive([int(pid.read_text())])


# ---- signals


async def test_usr2_drains_every_step_and_requeues_once(one: JobSide) -> None:
    leading = one.start("het", one.steps("control", "run", "fleet"))
    await one.are_up("control", "run", "fleet")
    signalled(signal.SIGUSR2)
    assert await leading == 75
    assert [one.told(name)[0] for name in ("control", "run", "fleet")] == ["drain"] * 3
    assert one.slurm.told == [("requeue", "9")] and one.sbatch.made == []


async def test_a_signal_to_the_steps_alone_is_a_drain_too(one: JobSide) -> None:
    leading = one.start("het", one.steps("control", "run", run="sleep 0.1; exit 75"))
    assert await leading == 75
    assert one.told("control") == ["drain"] and one.slurm.told == [("requeue", "9")]


async def test_a_driver_that_heard_the_signal_itself_goes_on_too(one: JobSide) -> None:
    deed = "while [ ! -e $1/control/drain.json ]; do sleep 0.01; done; exit 75"
    leading = one.start("het", one.steps("control", control=deed))
    await one.are_up("control")
    control.request(one.layout.root, "drain", control.TOLD_BY_SLURM)
    assert await leading == 75
    assert one.slurm.told == [("requeue", "9")]


async def test_where_a_requeue_is_refused_the_job_is_submitted_again(one: JobSide) -> None:
    one.slurm.refuses = {"requeue"}
    leading = one.start("het", one.steps("control"))
    await one.are_up("control")
    signalled(signal.SIGUSR2)
    assert await leading == 75
    assert one.sbatch.made == [("het", ["--dependency=afterany:9"])]


@pytest.mark.parametrize(("by", "made"), [("resubmit", [("het", ["--dependency=afterany:9"])]), ("none", [])])
async def test_going_on_without_a_requeue(side: Sides, by: str, made: list[object]) -> None:
    one = side("het", continue_by=by)
    one.is_job("9", HET_SIZE="5")
    one.note("9")
    leading = one.start("het", one.steps("control"))
    await one.are_up("control")
    signalled(signal.SIGUSR2)
    assert await leading == 75
    assert one.sbatch.made == made and one.slurm.told == []


async def test_a_run_that_went_on_often_enough_has_failed_and_says_so(side: Sides) -> None:
    one = side("het", max_requeues=2)
    one.is_job("9", HET_SIZE="5", RESTART_COUNT="2")
    one.note("9")
    lines = [one.step("control", drain=summarized("requeued", 75))]
    leading = one.start("het", lines)
    await one.are_up("control")
    signalled(signal.SIGUSR2)
    assert await leading == 1
    assert one.slurm.told == [] and one.sbatch.made == []
    assert one.summary()["state"] == "failed"
    assert "cluster.max_requeues=2" in one.summary()["stuck"] and "rollmill resume" in one.summary()["stuck"]


async def test_term_ends_the_steps_and_nothing_goes_on(one: JobSide) -> None:
    leading = one.start("het", one.steps("control", "run"))
    await one.are_up("control", "run")
    signalled(signal.SIGTERM)
    assert await leading == 143
    assert one.told("control") == ["stop"] == one.told("run")
    assert one.slurm.told == [] and one.sbatch.made == []


async def test_a_drain_that_takes_too_long_is_cut_short_and_the_run_goes_on_all_the_same(one: JobSide) -> None:
    deaf = [one.step("control", drain=":", stop="exit 130"), one.step("run", drain=":")]
    leading = one.start("het", deaf, signal_s=1)
    await one.are_up("control", "run")
    signalled(signal.SIGUSR2)
    assert await leading == 75
    assert one.told("control") == ["drain", "stop"] and one.told("run")[:2] == ["drain", "stop"]
    assert one.slurm.told == [("requeue", "9")]


async def test_steps_that_do_not_even_stop_are_killed_in_time(one: JobSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "RESERVE_S", 0.3)
    leading = one.start("het", [one.step("control", drain=":", stop=":")], signal_s=1)
    await one.are_up("control")
    signalled(signal.SIGUSR2)
    assert await leading == 75
    assert one.slurm.told == [("requeue", "9")]


async def test_a_run_that_was_cancelled_while_it_drained_stays_so(one: JobSide) -> None:
    lines = [one.step("control", drain=summarized("cancelled", 130))]
    leading = one.start("het", lines)
    await one.are_up("control")
    signalled(signal.SIGUSR2)
    assert await leading == 130
    assert one.slurm.told == [("cancel", ("9",), "all")]


# ---- what an earlier attempt left


async def test_an_earlier_attempts_drain_is_forgotten_and_a_cancel_is_not(one: JobSide) -> None:
    control.request(one.layout.root, "drain", control.TOLD_BY_SLURM)
    control.request(one.layout.root, "fail", "a component ended")
    control.request(one.layout.root, "cancel")
    await one.lead("het", one.steps("control", control="exit 0"))
    assert control.message(one.layout, "drain") is None
    assert control.message(one.layout, "fail") is None, "the component starts again with this job"
    assert control.pending(one.layout, "cancel")


async def test_a_linked_job_that_failed_before_the_routers_began_is_not_forgotten(side: Sides) -> None:
    made = side("linked")
    made.is_job("9")
    made.note("9", "control")
    control.request(made.layout.root, "fail", "component init ended with exit code 2")
    await made.lead("control", made.steps("control", control="exit 0"))
    assert control.message(made.layout, "fail") == "component init ended with exit code 2"


async def test_every_start_of_the_router_is_an_attempt_of_its_own(one: JobSide) -> None:
    await one.lead("het", one.steps("control", control="exit 0"))
    (one.layout.attempt_logs(1) / "control-node0.log").touch()
    await one.lead("het", one.steps("control", control="exit 0"))
    assert one.layout.attempt_logs(2).is_dir()


async def test_a_job_whose_submitter_died_notes_itself_down(side: Sides) -> None:
    made = side("het")
    made.is_job("9", HET_SIZE="5", JOB_NAME="rollmill-r-het-0123")
    assert await made.lead("het", made.steps("control", control="exit 0")) == 0
    (noted,) = record.read(made.layout)
    assert (noted.name, noted.job, noted.job_id, noted.control) == ("rollmill-r-het-0123", "het", "9", True)
    assert noted.components == list(HET) and noted.code == code_digest()


# ---- code that changed


async def test_changed_code_is_recorded_and_handed_on(side: Sides) -> None:
    one = side("het")
    one.is_job("9", HET_SIZE="5")
    one.note("9", code="0" * 64)
    assert await one.lead("het", one.steps("control", control="exit 0")) == 0
    assert (one.layout.root / "up-control").read_text().strip() == "1"
    one.note("9", code=code_digest())
    await one.lead("het", one.steps("control", control="exit 0"))
    assert (one.layout.root / "up-control").read_text().strip() == "0"


@pytest.mark.parametrize("changed", ["1", "0"])
def test_the_result_says_whether_the_code_changed(side: Sides, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    one = side("het")
    monkeypatch.setenv(CODE_CHANGED, changed)
    Driver(one.config, one.layout, 1, [])._leave_summary("requeued")
    assert one.summary()["code_changed"] is (changed == "1")


async def test_changed_code_is_refused_where_that_is_asked_for(side: Sides, capsys: pytest.CaptureFixture[str]) -> None:
    one = side("het", changed_code="refuse")
    one.is_job("9", HET_SIZE="5")
    one.note("9", code="0" * 64)
    assert await one.lead("het", one.steps("control", control="exit 0")) == 2
    assert not (one.layout.root / "up-control").exists()
    assert one.summary()["state"] == "failed" and "the code changed after job 9" in one.summary()["stuck"]
    assert "rollmill resume" in capsys.readouterr().err
    one.note("9", code=code_digest())
    assert await one.lead("het", one.steps("control", control="exit 0")) == 0


async def test_a_job_that_continues_carries_the_code_of_the_one_that_a_person_submitted(side: Sides) -> None:
    one = side("het", continue_by="resubmit")
    one.is_job("9", HET_SIZE="5")
    one.note("9", code="0" * 64)
    leading = one.start("het", one.steps("control"))
    await one.are_up("control")
    signalled(signal.SIGUSR2)
    assert await leading == 75
    assert record.read(one.layout)[-1].code == "0" * 64


async def test_a_followers_changed_code_fails_the_run_where_it_is_refused(side: Sides) -> None:
    made = side("linked", changed_code="refuse")
    made.is_job("10")
    made.note("10", "run", code="0" * 64)
    assert await made.lead("run", made.steps("run")) == 2
    assert "the code changed after job 10" in (control.message(made.layout, "fail") or "")


# ---- a job of workers or engines alone


@pytest.fixture
def follower(side: Sides, monkeypatch: pytest.MonkeyPatch) -> JobSide:
    """The RUN pool's linked job, 10, beside the router's, 9."""
    monkeypatch.setattr("launch.slurm.run_over.LOOK_S", 0.02)
    made = side("linked")
    made.is_job("10")
    made.note("9", "control")
    made.note("10", "run")
    return made


async def test_a_follower_ends_with_the_run(follower: JobSide, capsys: pytest.CaptureFixture[str]) -> None:
    leading = follower.start("run", follower.steps("run"))
    await follower.are_up("run")
    follower.leave_summary("completed")
    assert await leading == 0
    assert follower.told("run") == ["stop"] and "the run completed" in capsys.readouterr().err
    assert follower.slurm.calls == {}


async def test_a_follower_hears_from_slurm_that_the_router_will_not_come_back(
    follower: JobSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.slurm.run_over.ASK_S", 0.05)
    monkeypatch.setattr("launch.slurm.run_over.ASK_MAX_S", 0.05)
    monkeypatch.setattr("launch.slurm.run_over.ORPHAN_TTLS", 0.05)
    follower.slurm.known = [plain("9", "RUNNING")]
    leading = follower.start("run", follower.steps("run"))
    await follower.are_up("run")
    await eventually(lambda: follower.slurm.calls["jobs"] > 1, "it asks")
    assert not leading.done()
    follower.slurm.known = [plain("9", "TIMEOUT")]
    assert await leading == 0


async def test_a_followers_own_time_is_over(follower: JobSide) -> None:
    leading = follower.start("run", follower.steps("run"))
    await follower.are_up("run")
    signalled(signal.SIGUSR2)
    assert await leading == 75
    assert follower.slurm.told == [("requeue", "10")]
    assert control.message(follower.layout, "drain") is None, "the run itself goes on"


async def test_a_follower_that_cannot_go_on_fails_the_run(follower: JobSide) -> None:
    follower.is_job("10", RESTART_COUNT="10")
    leading = follower.start("run", follower.steps("run"))
    await follower.are_up("run")
    signalled(signal.SIGUSR2)
    assert await leading == 1
    assert "component run ended and cannot go on" in (control.message(follower.layout, "fail") or "")


async def test_a_followers_step_that_dies_fails_the_run(follower: JobSide) -> None:
    assert await follower.lead("run", follower.steps("run", run="exit 4")) == 4
    assert "component run ended with exit code 4" in (control.message(follower.layout, "fail") or "")


async def test_the_run_can_do_without_added_workers(follower: JobSide) -> None:
    follower.is_job("11")
    follower.note("11", "run+1", workers=2)
    assert await follower.lead("run+1", follower.steps("run+1", **{"run+1": "exit 4"})) == 4
    assert control.message(follower.layout, "fail") is None


async def test_term_ends_a_follower(follower: JobSide) -> None:
    leading = follower.start("run", follower.steps("run"))
    await follower.are_up("run")
    signalled(signal.SIGTERM)
    assert await leading == 143
    assert follower.told("run") == ["stop"]


# ---- preempted, and only the steps are told (no preempt_send_user_signal)


def in_grace(job_id: str) -> JobInfo:
    return plain(job_id, "RUNNING", started_at=1000, ended_at=1010, time_limit_min=60)


@pytest.mark.parametrize("first", ["control", "run"])
@pytest.mark.parametrize("continue_by", ["requeue", "resubmit"])
async def test_a_preemption_that_the_steps_alone_hear_of_lets_the_run_go_on(
    side: Sides, continue_by: str, first: str
) -> None:
    made = side("het", continue_by=continue_by)
    made.is_job("9", HET_SIZE="5")
    made.note("9")
    made.slurm.known = [in_grace("9")]
    code = 130 if first == "control" else 0
    lines = made.steps("control", "run", **{first: f"sleep 0.1; exit {code}"})
    assert await made.lead("het", lines) == 75
    assert control.message(made.layout, "fail") is None, "a worker that Slurm has ended is no failure"
    if continue_by == "requeue":
        assert made.slurm.told == [("requeue", "9")]
    else:
        assert made.slurm.told == [] and made.sbatch.made == [("het", ["--dependency=afterany:9"])]


async def test_a_successor_is_in_the_queue_before_a_grace_that_is_too_short_ends(side: Sides) -> None:
    made = side("het", continue_by="resubmit")
    made.is_job("9", HET_SIZE="5")
    made.note("9")
    made.slurm.known = [in_grace("9")]
    never = made.step("control", drain=":")
    leading = made.start("het", [never, *made.steps("run", run="sleep 0.1; exit 0")])
    await eventually(lambda: bool(made.sbatch.made), "the successor is submitted")
    assert not leading.done()
    signalled(signal.SIGTERM)
    assert await leading == 128 + signal.SIGTERM
    assert len(made.sbatch.made) == 1


async def test_a_preempted_follower_is_submitted_again(side: Sides) -> None:
    made = side("linked", continue_by="resubmit")
    made.is_job("10")
    made.note("9", "control")
    made.note("10", "run")
    made.slurm.known = [in_grace("10")]
    assert await made.lead("run", made.steps("run", run="sleep 0.1; exit 0")) == 75
    assert made.sbatch.made == [("run", ["--dependency=afterany:10"])]
    assert control.message(made.layout, "fail") is None
