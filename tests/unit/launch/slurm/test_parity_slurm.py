"""Public bugs of the field in keeping jobs: replicas that die, cancels that leave something, failures that pass."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.drive import BrokenRunError, Driver
from launch.slurm import cancelling, record
from launch.slurm.cancelling import cancel_jobs
from launch.slurm.continuing import Continuing
from launch.slurm.elastic import scale
from launch.slurm.follow import RunFailedError, _result
from launch.slurm.submit import place
from launch.verbs.status import status_text
from stages import control
from stages.errors import ServiceError
from stages.http import RouterLink
from stages.layout import RunLayout
from stages.ledger.events import ReplicaChanged, SessionOpened
from stages.router.auth import Tokens, make_secrets
from stages.router.replicas import FAILURES_TO_EJECT, Replicas
from tests.support import runs
from tests.support.fleets import InstantRouter
from tests.support.routers import make_run, routed
from tests.support.waiting import poll
from tests.unit.launch.slurm.conftest import Sides
from tests.unit.launch.slurm.leaders import JobSide, het, plain, summarized
from tests.unit.launch.slurm.test_step import Task

# ---- B7: a replica dies


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Task]:
    made = Task(tmp_path / "run", "fleet", "replica=2,1-2")
    yield made
    made.close()


def test_b07_a_replica_that_dies_is_started_again_and_the_other_stays(fleet: Task) -> None:
    before = fleet.await_living("replica-1", "replica-2")
    os.kill(before["replica-1"], signal.SIGKILL)
    poll(lambda: fleet.living().get("replica-1", before["replica-1"]) != before["replica-1"], "it lives again")
    assert fleet.living()["replica-2"] == before["replica-2"]
    fleet.say("stop")
    code, said = fleet.end()
    assert code == 0 and "replica-1 ended with signal 9; started again" in said


def test_b07_a_replica_that_cannot_live_ends_its_component_which_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "dies-replica-1").touch()
    fleet = Task(tmp_path / "run", "fleet", "replica=1,1-1", restarts=2)
    code, said = fleet.end()
    fleet.close()
    last = said.splitlines()[-1]
    assert code == 1
    assert last == "rollmill: replica-1 ended with exit code 1 3 times: replica-1: no memory for the model"


async def test_b07_a_component_that_ended_ends_the_run_with_its_own_words(side: Sides) -> None:
    made = side("linked")
    made.is_job("12")
    made.note("12", "fleet")
    log = made.layout.attempt_logs(1) / "fleet-node0.log"
    dies = f"echo 'rollmill: replica-1 ended with exit code 1 9 times: no memory' > {log}; exit 1"
    assert await made.lead("fleet", made.steps("fleet", fleet=dies)) == 1, "its nodes are released"
    driver = Driver(made.config, made.layout, 1, [])
    with pytest.raises(BrokenRunError, match=r"component fleet ended with exit code 1: replica-1 .*no memory"):
        await driver._is_over()


async def test_b07_sessions_of_a_dead_replica_move_and_status_says_which_it_is() -> None:
    router, dead = InstantRouter(), {"http://r1"}

    async def probe(url: str) -> bool:
        return url not in dead

    replicas = Replicas(router, probe)  # type: ignore[arg-type]
    for name in ("r1", "r2"):
        router.driven.apply(
            ReplicaChanged(t=1.0, replica=name, change="join", url=f"http://{name}", model="m", capacity=8)
        )
    (rollout, _) = router.driven.submit(n=2)
    router.driven.apply(SessionOpened(t=1.0, rollout_id=rollout, attempt=1, replica="r1"))
    state = router.ledger.state.fleet
    for _ in range(FAILURES_TO_EJECT):
        assert state.usable(rollout, 1) is not None
        await replicas._probe_one("r1")
        await replicas._probe_one("r2")
    assert state.usable(rollout, 1) is None and state.choose() == "r2"
    shown = replicas.listing()
    assert [(one["id"], one["state"]) for one in shown] == [("r1", "down"), ("r2", "ready")]
    document = {"state": "running", "fleet": shown, "stages": {}, "rollouts": {}}
    lines = status_text(document).splitlines()
    assert any("r1 down" in line and "probes of http://r1/health failed" in line for line in lines)


# ---- B8: nothing is left


async def test_b08_every_job_of_the_run_is_cancelled_also_those_that_were_added(
    side: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancelling, "IN_ORDER_S", 0.05)
    made = side("linked")
    for job_id, job in (("9", "control"), ("10", "run")):
        made.note(job_id, job)
    for _ in range(2):
        await scale(made.config, made.layout, "run", 2)
    made.slurm.known = [plain(job_id, "RUNNING") for job_id in ("9", "10", "100", "101")]
    await cancel_jobs(made.layout.root)
    assert {job.job_id for job in made.slurm.known if job.state.value == "cancelled"} == {"9", "10", "100", "101"}
    assert made.summary()["state"] == "cancelled"


async def test_b08_a_cancelled_runs_leader_ends_its_steps_and_its_jobs(side: Sides) -> None:
    made = side("linked")
    made.is_job("9")
    made.note("9", "control")
    made.note("10", "run")
    assert await made.lead("control", made.steps("control", control=summarized("cancelled", 130))) == 130
    assert made.slurm.told == [("cancel", ("10",), "all"), ("cancel", ("9",), "all")]


async def test_b08_scancel_ends_every_step_before_the_leader_goes(side: Sides) -> None:
    made = side("het")
    made.is_job("9", HET_SIZE="5")
    made.note("9")
    leading = made.start("het", made.steps("control", "run", control="echo $$ > $1/pid", run="echo $$ > $1/pid-run"))
    await made.are_up("control", "run")
    pids = [int(poll((made.layout.root / name).read_text, name)) for name in ("pid", "pid-run")]
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await leading == 143
    assert runs.alive(pids) == []


def test_b08_a_step_whose_leader_is_gone_leaves_no_process(fleet: Task) -> None:
    fleet.await_living("replica-1", "replica-2")
    fleet.hang_up()
    fleet.end()
    assert fleet.living() == {}


# ---- B19: a failure is a failure


@pytest.mark.parametrize("code", [1, 2, 137])
async def test_b19_the_drivers_failure_is_the_jobs(side: Sides, code: int) -> None:
    made = side("het")
    made.is_job("9", HET_SIZE="5")
    made.note("9")
    assert await made.lead("het", made.steps("control", "run", control=f"exit {code}")) == code
    assert made.slurm.told == [] and made.sbatch.made == [], "nothing that failed goes on by itself"


def test_b19_the_command_line_quotes_the_first_error_and_ends_with_1(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    layout.report.mkdir()
    summary = {
        "state": "failed", "stuck": None, "error": "none of 16 rollouts completed; the first failed by llm: refused",
        "rollouts": {"accepted": 16, "completed": 0, "failed": 16, "cancelled": 0, "open": 0},
    }  # fmt: skip
    layout.summary.write_text(json.dumps(summary))
    with pytest.raises(RunFailedError, match="none of 16 rollouts completed; the first failed by llm") as caught:
        _result(layout, {**summary, "error": None})
    assert caught.value.exit_code == 1
    layout.summary.unlink()
    with pytest.raises(RunFailedError, match="job 9 reached its time limit"):
        _result(layout, {"state": "failed", "stuck": "job 9 reached its time limit"})


# ---- B23: one logical job


async def test_b23_a_job_that_was_preempted_is_the_same_run_one_attempt_later(side: Sides) -> None:
    made = side("het")
    made.note("9")
    for attempt, restarts in ((1, "0"), (2, "1"), (3, "2")):
        made.is_job("9", HET_SIZE="5", RESTART_COUNT=restarts)
        deed = f"touch $1/logs/attempt_{attempt}/control-node0.log; test $ROLLMILL_ATTEMPT = {attempt}; exit $?"
        assert await made.lead("het", made.steps("control", control=deed)) == 0
    assert [one.job_id for one in record.read(made.layout)] == ["9"]
    assert made.sbatch.made == []


# ---- B24: another user on the node


async def test_b24_nobody_uses_the_router_without_its_token(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    async with routed(layout):
        url = json.loads(layout.router_json.read_text())["url"]
        for token in ("", "guessed", layout.root.name):
            async with RouterLink("trainer", url=url, token=token) as stranger:
                with pytest.raises(ServiceError) as caught:
                    await stranger.call("GET", "/v1/status", answer=bytes, patience_s=5.0)
            assert caught.value.status == 401


def test_b24_tokens_are_their_owners_alone_and_have_one_role(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    before = layout.trainer_token.read_bytes()
    make_secrets(layout)
    assert layout.trainer_token.read_bytes() == before and len(before) >= 32
    for path in (layout.trainer_token, layout.worker_token, layout.engine_token, layout.callback_key):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    tokens = Tokens(layout)
    header = f"Bearer {layout.worker_token.read_text()}"
    tokens.check(header, frozenset({"worker"}))
    for given, allowed, status in ((header, "trainer", 403), (header[:-1], "worker", 401), (None, "worker", 401)):
        with pytest.raises(ServiceError) as caught:
            tokens.check(given, frozenset({allowed}))  # type: ignore[arg-type]
        assert caught.value.status == status


# ---- B27: het that never starts


@pytest.fixture
def auto(side: Sides, monkeypatch: pytest.MonkeyPatch) -> JobSide:
    monkeypatch.setattr("launch.slurm.submit.places", lambda _: [])
    made = side("auto", het_max_pending_s=600.0)
    place(made.config, made.layout, "r", "launch")
    return made


async def test_b27_auto_leaves_het_for_linked_after_the_configured_time(auto: JobSide) -> None:
    first, held_back = record.read(auto.layout)
    assert auto.sbatch.made == [("het", []), ("control", ["--begin=now+600"])]
    auto.slurm.known = [*het("PENDING", "PENDING", job_id=first.job_id), plain(held_back.job_id, "RUNNING")]
    auto.is_job(held_back.job_id)
    assert await Continuing(auto.config, auto.layout, "control").end_rivals() == ""
    assert {job.state.value for job in auto.slurm.known if job.het_offset is not None} == {"cancelled"}
    assert [name for name, _ in auto.sbatch.made[2:]] == ["init", "run", "eval", "fleet"]
    assert {one.placement for one in record.read(auto.layout)} == {"linked"}


async def test_b27_auto_stays_with_het_where_that_starts_in_time(auto: JobSide) -> None:
    first, held_back = record.read(auto.layout)
    auto.slurm.known = [*het("RUNNING", "RUNNING", job_id=first.job_id), plain(held_back.job_id, "PENDING")]
    auto.is_job(first.job_id)
    assert await Continuing(auto.config, auto.layout, "het").end_rivals() == ""
    assert {job.job_id: job.state.value for job in auto.slurm.known}[held_back.job_id] == "cancelled"
    assert len(auto.sbatch.made) == 2 and control.message(auto.layout, "fail") is None


def test_b27_auto_is_linked_at_once_where_slurm_refuses_het(side: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.slurm.submit.places", lambda _: [])
    made = side("auto")
    made.sbatch.refused = {"het"}
    place(made.config, made.layout, "r", "launch")
    assert {one.placement for one in record.read(made.layout)} == {"linked"}
