"""What a run's submission becomes: which placement, which jobs, and what holds it back."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import pytest

from conf.schema import Checkpoint, Config
from launch.slurm import executor, record, submit
from launch.slurm.client.protocol import NodeInfo, Partition, SiteInfo
from launch.slurm.errors import SubmissionError
from launch.slurm.executor import Submitted
from launch.slurm.shapes import Job, jobs_of
from launch.slurm.submit import TooManySubmissionsError, failed_nodes, place, submit_job, submit_run
from tests.unit.launch.slurm.conftest import Sides
from tests.unit.launch.slurm.leaders import JobSide, het, plain

LINKED = ["control", "init", "run", "eval", "fleet"]


@pytest.fixture(autouse=True)
def no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this machine's own directories lie is not what is asked here."""
    monkeypatch.setattr(submit, "places", lambda _: [])


def placed(made: JobSide) -> list[str]:
    place(made.config, made.layout, "r", "launch")
    return [name for name, _ in made.sbatch.made]


@pytest.mark.parametrize(("placement", "jobs"), [("het", ["het"]), ("colocated", ["colocated"]), ("linked", LINKED)])
def test_each_placement_submits_its_jobs(side: Sides, placement: str, jobs: list[str]) -> None:
    made = side(placement)
    assert placed(made) == jobs
    noted = record.read(made.layout)
    assert [one.job for one in noted] == jobs
    assert [one.job for one in noted if one.control] == jobs[:1], "the router's is the first"
    assert len({one.code for one in noted}) == 1 and len(noted[0].code) == 64


def test_auto_is_het_with_the_routers_linked_job_held_back_behind_it(side: Sides) -> None:
    made = side("auto", het_max_pending_s=600.0)
    assert placed(made) == ["het", "control"]
    assert made.sbatch.made[1][1] == ["--begin=now+600"]
    assert [(one.placement, one.reason) for one in record.read(made.layout)] == [
        ("het", "launch"),
        ("linked", "fallback"),
    ]


def test_autos_held_back_job_may_pass_the_heterogeneous_one_once_its_time_has_come(side: Sides) -> None:
    """It has waited 600 s less then, and asks for less: 600 * 1000 / 3600 and 5 / 10 * 100 points, and one."""
    made = side("auto", het_max_pending_s=600.0, nice=7)
    nodes = tuple(
        NodeInfo(name=f"cpu{at}", state="idle", cpus=8, idle_cpus=8, mem_mib=16000, partitions=("cpu",))
        for at in range(10)
    )
    made.slurm.at = SiteInfo(
        cluster="ci", version=(24, 11), partitions=(), nodes=nodes, age_points=1000 / 3600, age_most=1000, size_most=100
    )
    placed(made)
    assert made.sbatch.nice == [7 + 167 + 50 + 1, 7]


def test_auto_is_linked_where_slurm_refuses_het(side: Sides, capsys: pytest.CaptureFixture[str]) -> None:
    made = side("auto")
    made.sbatch.refused = {"het"}
    assert placed(made) == ["het", *LINKED]
    assert "no heterogeneous job here, so linked jobs" in capsys.readouterr().err


@pytest.mark.parametrize("keys", [{"het_max_nodes": 4}, {"het_max_pending_s": 0.0}])
def test_auto_is_linked_where_het_is_large_or_may_not_wait(side: Sides, keys: dict[str, Any]) -> None:
    assert placed(side("auto", **keys)) == LINKED


def test_auto_without_a_linked_job_in_reserve_is_submitted_all_the_same(
    side: Sides, capsys: pytest.CaptureFixture[str]
) -> None:
    made = side("auto", max_submissions_per_hour=1)
    made.sbatch.refused = {"control"}
    assert placed(made) == ["het"]
    assert "no linked job waits behind it" in capsys.readouterr().err


def test_part_of_a_placement_is_taken_back(side: Sides) -> None:
    made = side("linked")
    made.sbatch.refused = {"eval"}
    with pytest.raises(SubmissionError, match="Slurm refused eval"):
        place(made.config, made.layout, "r", "launch")
    assert made.slurm.told == [("cancel", ("100", "101", "102"), "all")]
    assert record.read(made.layout) == []


def test_no_more_jobs_than_the_hour_allows_forgotten_ones_counted(side: Sides) -> None:
    made = side("het", max_submissions_per_hour=2)
    job = jobs_of(made.config, "het")[0]
    submit_job(made.config, made.layout, "r", job, "het", "launch")
    record.forget(made.layout, made.note("50", "control", submitted_at=time.time()))
    with pytest.raises(TooManySubmissionsError, match=r"cluster\.max_submissions_per_hour=2"):
        submit_job(made.config, made.layout, "r", job, "het", "resume")


@pytest.mark.parametrize(("others", "excluded"), [(60, ["cpu1", "cpu7"]), (4, ["cpu1"])])
def test_nodes_that_failed_under_the_run_are_left_out_next_time_where_there_are_enough_others(
    side: Sides, monkeypatch: pytest.MonkeyPatch, others: int, excluded: list[str]
) -> None:
    nodes = [
        NodeInfo(name=f"cpu{number}", state="idle", cpus=8, idle_cpus=8, mem_mib=16000, partitions=("cpu",))
        for number in (7, *range(10, 10 + others))
    ]
    site = SiteInfo(
        cluster="ci", version=(22, 5), partitions=(Partition(name="cpu", default=True),), nodes=tuple(nodes)
    )

    class Known:
        async def site(self) -> SiteInfo:
            return site

    made = side("het", exclude=["cpu1"])
    monkeypatch.setattr(submit, "open_client", lambda clusters: Known())
    said = "srun: error: Node failure on cpu7\nslurmstepd: error: *** STEP 9.1 CANCELLED DUE TO NODE FAILURE ***\n"
    (made.layout.slurm / "9.out").write_text(said * 2)
    assert failed_nodes(made.layout) == ["cpu7"]
    old = made.layout.slurm / "8.out"
    old.write_text("srun: error: Node failure on cpu8\n")
    os.utime(old, (time.time() - 90_000,) * 2)
    assert failed_nodes(made.layout) == ["cpu7"], "cpu8 failed more than a day ago"
    placed(made)
    assert made.sbatch.excluded == excluded


@pytest.fixture
def parts_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fine(_: object) -> None:
        pass

    monkeypatch.setattr(submit, "check_parts", fine)


@pytest.mark.usefixtures("parts_are_fine")
async def test_a_run_that_goes_on_already_is_not_submitted_again(
    side: Sides, capsys: pytest.CaptureFixture[str]
) -> None:
    made = side("het")
    made.note("9")
    made.slurm.known = het("RUNNING", "RUNNING")
    assert await submit_run(made.config) == 0
    assert made.sbatch.made == [] and "goes on already as job 9+0 (running)" in capsys.readouterr().out
    made.slurm.known = het("TIMEOUT", "TIMEOUT")
    assert await submit_run(made.config) == 0
    assert [one.reason for one in record.read(made.layout)] == ["launch", "resume"]


@pytest.mark.usefixtures("parts_are_fine")
async def test_workers_without_a_router_are_ended_and_all_is_submitted_anew(
    side: Sides, capsys: pytest.CaptureFixture[str]
) -> None:
    made = side("linked")
    for number, job in enumerate(LINKED):
        made.note(str(9 + number), job)
    made.slurm.known = [plain("9", "FAILED"), plain("10", "RUNNING"), plain("11", "PENDING"), plain("12", "TIMEOUT")]
    assert await submit_run(made.config) == 0
    assert ("cancel", ("10", "11"), "all") in made.slurm.told
    assert [name for name, _ in made.sbatch.made] == LINKED
    assert "10 (running), 11 (pending) ended; all are submitted anew" in capsys.readouterr().out
    made.slurm.known = [plain("100", "PENDING"), plain("101", "FAILED")]
    assert await submit_run(made.config) == 0
    assert len(made.sbatch.made) == len(LINKED), "a router's job that waits carries the run on"


def test_a_runs_later_jobs_go_to_the_cluster_of_its_first(side: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    made = side("linked", clusters=["east", "west"])
    asked: list[list[str]] = []

    def sbatch(job: Job, config: Config, *, name: str, **_: Any) -> Submitted:
        asked.append(config.cluster.clusters)
        return Submitted(name, str(len(asked)), config.cluster.clusters[-1], made.layout.slurm / f"{name}.sh")

    monkeypatch.setattr(executor, "submit", sbatch)
    place(made.config, made.layout, "r", "launch")
    assert asked == [["east", "west"], *[["west"]] * 4]
    assert {tuple(one.clusters) for one in record.read(made.layout)} == {("west",)}


@pytest.mark.usefixtures("parts_are_fine")
async def test_half_a_job_is_ended_before_the_run_is_carried_on(side: Sides) -> None:
    made = side("het")
    made.note("9")
    made.slurm.known = het("PENDING", "FAILED")
    assert await submit_run(made.config) == 0
    assert ("cancel", ("9",), "all") in made.slurm.told
    assert [name for name, _ in made.sbatch.made] == ["het"]


@pytest.mark.parametrize(("mode", "turns"), [("REQUEUE", 1), ("OFF", 0)])
async def test_turns_are_checkpointed_where_jobs_may_be_preempted(side: Sides, mode: str, turns: int) -> None:
    made = side("het", partition="p")
    made.layout.manifest.unlink()
    made.slurm.parts = (Partition(name="p", preempt_mode=mode), Partition(name="q", preempt_mode="CANCEL"))
    open_ = replace(made.config, checkpoint=Checkpoint())
    assert (await submit._with_checkpoints(open_)).checkpoint.turns == turns
    several = replace(open_, cluster=replace(open_.cluster, partition="o,p"))
    assert (await submit._with_checkpoints(several)).checkpoint.turns == turns
    chosen = replace(made.config, checkpoint=replace(made.config.checkpoint, turns=3))
    assert (await submit._with_checkpoints(chosen)).checkpoint.turns == 3


async def test_a_run_that_is_there_keeps_the_checkpoints_that_it_began_with(side: Sides) -> None:
    made = side("het", partition="p")
    made.slurm.parts = (Partition(name="p", preempt_mode="REQUEUE"),)
    again = replace(made.config, checkpoint=Checkpoint())
    assert (await submit._with_checkpoints(again)).checkpoint.turns == 0
    assert made.slurm.calls == {}


@pytest.mark.usefixtures("parts_are_fine")
async def test_a_refused_resume_leaves_the_old_result(side: Sides) -> None:
    made = side("het")
    made.note("9")
    made.leave_summary("failed")
    made.slurm.known = het("FAILED", "FAILED")
    made.sbatch.refused = {"het"}
    with pytest.raises(SubmissionError):
        await submit_run(made.config)
    assert made.summary()["state"] == "failed"
    made.sbatch.refused = set()
    assert await submit_run(made.config) == 0
    assert made.summary() == {}


@pytest.mark.usefixtures("parts_are_fine")
async def test_a_result_that_the_new_start_has_left_already_stays(side: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    made = side("het")
    made.leave_summary("requeued")
    sbatch = made.sbatch.submit

    def quick(job: Job, config: Config, **more: Any) -> Submitted:
        made.leave_summary("completed")
        return sbatch(job, config, **more)

    monkeypatch.setattr(executor, "submit", quick)
    assert await submit_run(made.config) == 0
    assert made.summary()["state"] == "completed"
