"""Which of two placements stays, how often a run goes on, and what a job can know of its own end."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from launch.slurm import record
from launch.slurm.client import json_shapes
from launch.slurm.client.errors import SlurmUnavailable
from launch.slurm.continuing import Continuing
from stages import sharedfs
from tests.unit.launch.slurm.conftest import Sides
from tests.unit.launch.slurm.leaders import JobSide, ScriptedSlurm, het, plain


@pytest.fixture
def auto(side: Sides) -> JobSide:
    """placement=auto: the heterogeneous job, 9, and the router's linked job, 10, which is held back."""
    made = side("auto")
    made.note("9")
    made.note("10", "control", reason="fallback", code="c0de")
    return made


def continuing(made: JobSide, job_id: str, job: str, **facts: str) -> Continuing:
    made.is_job(job_id, **facts)
    return Continuing(made.config, made.layout, job)


def jobs(made: JobSide) -> dict[str, str]:
    return {one.job: one.placement for one in record.read(made.layout)}


async def test_auto_the_het_job_takes_the_held_back_one_away(auto: JobSide) -> None:
    auto.slurm.known = [*het("RUNNING", "RUNNING"), plain("10", "PENDING")]
    assert await continuing(auto, "9", "het").end_rivals() == ""
    assert auto.slurm.told == [("cancel", ("10",), "all")] and auto.sbatch.made == []
    assert jobs(auto) == {"het": "het"}


async def test_auto_the_held_back_job_takes_a_waiting_het_job_away_and_brings_the_others(auto: JobSide) -> None:
    auto.slurm.known = [*het("PENDING", "PENDING"), plain("10", "RUNNING")]
    assert await continuing(auto, "10", "control").end_rivals() == ""
    assert auto.slurm.told == [("cancel", ("9",), "pending")]
    assert [name for name, _ in auto.sbatch.made] == ["init", "run", "eval", "fleet"]
    assert set(jobs(auto).values()) == {"linked"}
    assert {one.code for one in record.read(auto.layout)} == {"c0de"}, "the code that a person submitted"


async def test_auto_where_both_start_in_one_moment_the_het_job_stays(auto: JobSide) -> None:
    auto.slurm.known = [*het("RUNNING", "RUNNING"), plain("10", "RUNNING")]
    held_back, first = continuing(auto, "10", "control"), continuing(auto, "9", "het")
    assert "heterogeneous job 9 has started" in await held_back.end_rivals()
    assert auto.sbatch.made == []
    assert await first.end_rivals() == ""
    assert jobs(auto) == {"het": "het"}
    assert [job.state.value for job in auto.slurm.known] == ["running", "running", "cancelled"]
    late = continuing(auto, "10", "control")
    assert "started before" in await late.end_rivals(), "its leader begins after it was taken out of the run"
    assert jobs(auto) == {"het": "het"}


async def test_auto_a_leader_that_died_over_it_submits_nothing_twice(auto: JobSide) -> None:
    auto.slurm.known = [plain("10", "RUNNING")]
    auto.note("11", "init", reason="fallback")
    auto.note("12", "run", reason="fallback")
    assert await continuing(auto, "10", "control", RESTART_COUNT="1").end_rivals() == ""
    assert [name for name, _ in auto.sbatch.made] == ["eval", "fleet"]
    assert await continuing(auto, "10", "control", RESTART_COUNT="2").end_rivals() == ""
    assert len(auto.sbatch.made) == 2


async def test_without_rivals_slurm_is_left_alone(side: Sides) -> None:
    made = side("het")
    made.note("9")
    assert await continuing(made, "9", "het").end_rivals() == ""
    assert made.slurm.calls == {}


@pytest.mark.parametrize(
    ("reasons", "restarts", "may"),
    [
        (["launch"], "2", True), (["launch"], "3", False),
        (["launch", "continue", "continue"], "0", True), (["launch", "continue", "continue"], "1", False),
        (["launch", "continue", "continue", "continue"], "0", False),
        (["launch", "continue", "continue", "continue", "resume"], "0", True),
        (["launch", "continue", "continue", "resume", "continue", "continue"], "1", False),
    ],
)  # fmt: skip
async def test_a_run_goes_on_so_often_since_somebody_last_started_it(
    side: Sides, reasons: list[str], restarts: str, may: bool
) -> None:
    made = side("het", max_requeues=3)
    for number, reason in enumerate(reasons):
        made.note(str(9 + number), reason=reason)
    job = continuing(made, str(8 + len(reasons)), "het", RESTART_COUNT=restarts)
    assert (await job.go_on() == 75) is may
    assert bool(made.slurm.told) is may


async def test_an_added_job_is_not_asked_for_again(side: Sides) -> None:
    made = side("linked", continue_by="resubmit")
    made.note("9", "control")
    made.note("11", "run+1", workers=2)
    assert await continuing(made, "11", "run+1").go_on() == 75
    assert made.sbatch.made == []


async def test_a_successor_that_slurm_refuses_is_a_failure_that_says_what_to_do(
    side: Sides, capsys: pytest.CaptureFixture[str]
) -> None:
    made = side("het", continue_by="resubmit")
    made.note("9")
    made.sbatch.refused = {"het"}
    assert await continuing(made, "9", "het").go_on() == 1
    assert "`rollmill resume` carries it on" in capsys.readouterr().err


async def test_what_is_left_of_a_jobs_time(side: Sides) -> None:
    made = side("het")
    made.note("9")
    job = continuing(made, "9", "het")
    made.slurm.known = [plain("9", "RUNNING", ended_at=round(time.time()) + 50)]
    left = await job.seconds_left()
    assert left is not None and 45 < left <= 51
    made.slurm.known = [plain("9", "RUNNING")]
    assert await job.seconds_left() is None
    made.slurm.error = SlurmUnavailable("squeue: no answer")
    assert await job.seconds_left() is None


async def test_a_component_is_lost_only_where_slurm_took_it(side: Sides) -> None:
    made = side("het")
    made.note("9", components=("control", "run"))
    job = continuing(made, "9", "het")
    made.slurm.known = het("RUNNING", "NODE_FAIL")
    assert await job.lost_component("run") == "half of the job is gone: run (9+1) is node_fail"
    made.slurm.known = het("RUNNING", "RUNNING")
    assert await job.lost_component("run") is None
    made.slurm.error = SlurmUnavailable("squeue: no answer")
    assert await job.lost_component("run") is None


# ---- its own job


async def test_what_its_submitter_notes_late_decides_whose_successor_it_is(side: Sides) -> None:
    """The job starts before the submitter's record is there, and makes one of its own in the meantime."""
    made = side("linked", continue_by="resubmit")
    made.note("9", "run")
    job = continuing(made, "10", "run", JOB_NAME="rollmill-x-10")
    await job.end_predecessor()
    assert made.slurm.told == []
    made.note("10", "run", reason="continue")
    await job.end_predecessor()
    assert made.slurm.told == [("cancel", ("9",), "all")]


async def test_an_end_takes_all_jobs_that_lost_nodes_also_superseded_and_added_ones(side: Sides) -> None:
    made = side("linked")
    pools = replace(made.config.pools, run=replace(made.config.pools.run, workers=1, nodes=2))
    made.config = replace(made.config, pools=pools)
    made.note("9", "control")
    for job_id, job, workers in (("10", "run", 0), ("11", "run+1", 2), ("12", "run+2", 2), ("13", "run", 0)):
        made.note(job_id, job, workers=workers, first=3)
    nodes = {"10": 1, "11": 1, "12": 2, "13": 2}
    made.slurm.known = [plain(job_id, "RUNNING", node_count=count) for job_id, count in nodes.items()]
    assert await continuing(made, "9", "control").finish(0) == 0
    assert ("cancel", ("10", "11"), "all") in made.slurm.told
    assert [job.state.value for job in made.slurm.known] == ["cancelled", "cancelled", "running", "running"]


async def test_its_own_record_is_found_where_the_directory_is_not_listed_yet(
    side: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = side("linked", continue_by="resubmit")
    noted = made.note("9", "control", reason="fallback", code="c0de")
    listed = sharedfs.list_dir
    monkeypatch.setattr(sharedfs, "list_dir", lambda path: [] if path == made.layout.slurm else listed(path))
    job = continuing(made, "9", "control", JOB_NAME=noted.name)
    assert job.changed_code(), "it knows the code that it was submitted with"
    assert record.find(made.layout, noted.name) == noted, "and leaves the record as it is"


async def test_a_job_that_was_submitted_twice_is_not_the_run(side: Sides) -> None:
    """sbatch's outcome was unknown, and the submitter has settled for the other job of that name."""
    made = side("het")
    noted = made.note("9")
    made.note("8", reason="launch")
    double = continuing(made, "10", "het", JOB_NAME=noted.name)
    assert "started before" in await double.end_rivals()
    assert [one.job_id for one in record.read(made.layout)] == ["8", "9"]


class Clusters:
    """Notes which cluster is told what."""

    def __init__(self, made: JobSide, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[tuple[str, ...]] = []

        def open_client(clusters: Sequence[str]) -> ScriptedSlurm:
            self.opened.append(tuple(clusters))
            return made.slurm

        monkeypatch.setattr("launch.slurm.continuing.open_client", open_client)


@pytest.mark.parametrize("recorded", [["west"], ["east", "west"], None])
async def test_a_job_speaks_to_its_own_cluster_alone(
    side: Sides, monkeypatch: pytest.MonkeyPatch, recorded: list[str] | None
) -> None:
    made = side("linked", clusters=["east", "west"])
    clusters = Clusters(made, monkeypatch)
    if recorded:
        made.note("9", "control", clusters=recorded)
    made.note("10", "run", clusters=["west"])
    job = continuing(made, "9", "control", CLUSTER_NAME="west")
    assert await job.go_on() == 75 and ("requeue", "9") in made.slurm.told
    assert await job.finish(1) == 1 and ("cancel", ("10",), "pending") in made.slurm.told
    assert set(clusters.opened) == {("west",)}


async def test_jsons_end_of_a_job_without_a_limit_is_no_preemption(side: Sides) -> None:
    """Slurm gives it a year."""
    made = side("het")
    made.note("9")
    job = continuing(made, "9", "het")
    for end, preempted in ((1000 + 365 * 86400, False), (1500, True)):
        said = {
            "job_id": 9, "job_state": ["RUNNING"], "time_limit": {"set": False, "infinite": True, "number": 0},
            "start_time": {"set": True, "number": 1000}, "end_time": {"set": True, "number": end},
        }  # fmt: skip
        made.slurm.known = json_shapes.parse(json.dumps({"jobs": [said]}))
        assert await job.is_preempted() is preempted


@pytest.mark.parametrize(
    ("state", "end", "limit_min", "preempted"),
    [("RUNNING", 900, 60, True), ("RUNNING", 3600, 60, False), ("RUNNING", 900, None, True),
     ("RUNNING", 365 * 86400, None, False), ("RUNNING", None, None, False), ("COMPLETING", 900, 60, False)],
)  # fmt: skip
async def test_an_end_before_the_limit_is_a_preemption(
    side: Sides, state: str, end: int | None, limit_min: int | None, preempted: bool
) -> None:
    made = side("het")
    made.note("9")
    job = continuing(made, "9", "het")
    ended_at = None if end is None else 1000 + end
    made.slurm.known = [plain("9", state, started_at=1000, ended_at=ended_at, time_limit_min=limit_min)]
    assert await job.is_preempted() is preempted
    made.slurm.error = SlurmUnavailable("squeue: no answer")
    assert await job.is_preempted() is False
