"""CPU-hours, GPU-hours, idle share and cost from accounting, and nothing where there is none."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launch.slurm.accounting import account, component_names, summarize
from launch.slurm.client.errors import SlurmUnavailable
from launch.slurm.client.protocol import JobUsage
from launch.slurm.client.sacct import parse_usage
from launch.slurm.client.states import JobState
from launch.slurm.record import Submission
from tests.unit.launch.slurm.client.slurms import FakeSlurm, recorded


def submission(job_id: str, *components: str, job: str = "het") -> Submission:
    return Submission(
        name=f"n{job_id}", job=job, job_id=job_id, placement="het", components=list(components), submitted_at=100.0
    )


def usage(
    job_id: str, *, cpus: int, elapsed_s: int, cpu_s: float | None, gpus: int = 0, began: int | None = 5
) -> JobUsage:
    return JobUsage(
        job_id=job_id, leader_id=job_id.partition("+")[0], het_offset=None, partition="p", state=JobState.COMPLETED,
        started_at=began, elapsed_s=elapsed_s, cpus=cpus, gpus=gpus, nodes=1, cpu_s=cpu_s,
    )  # fmt: skip


HET = [submission("9", "control", "run")]


def test_components_by_job() -> None:
    linked = submission("12", "run", job="run")
    assert component_names([*HET, linked]) == {"9+0": "control", "9+1": "run", "12": "run"}


def test_figures_of_a_pool_and_in_all() -> None:
    found = summarize(
        [usage("9+0", cpus=1, elapsed_s=3600, cpu_s=360), usage("9+1", cpus=8, elapsed_s=3600, cpu_s=7200, gpus=2)],
        HET, 500,
    )  # fmt: skip
    assert found["pools"]["run"] == {
        "cpu_hours": 8.0, "gpu_hours": 2.0, "idle_share": 0.75, "attempts": 1,
        "cost_per_1000": {"cpu_hours": 16.0, "gpu_hours": 4.0},
    }  # fmt: skip
    assert found["pools"]["control"]["idle_share"] == 0.9
    assert found["total"]["cpu_hours"] == 9.0
    assert found["reason"] is None


def test_attempts_add_up_and_what_is_not_known_is_null() -> None:
    attempts = [usage("9+1", cpus=4, elapsed_s=900, cpu_s=900), usage("9+1", cpus=4, elapsed_s=900, cpu_s=None)]
    found = summarize(attempts, HET, 0)["pools"]["run"]
    assert (found["cpu_hours"], found["attempts"], found["idle_share"], found["cost_per_1000"]) == (2.0, 2, 0.75, None)
    running = [*attempts, replace(attempts[0], state=JobState.RUNNING)]
    assert (summarize(attempts, HET, 0)["settled"], summarize(running, HET, 0)["settled"]) == (True, False)
    assert "will grow" in summarize(running, HET, 0)["reason"]
    again = [replace(attempts[0], state=JobState.REQUEUED), attempts[1]]
    assert summarize(again, HET, 0)["settled"], "an attempt that was queued again is over"
    never = summarize([usage("9+1", cpus=4, elapsed_s=0, cpu_s=None, began=None)], HET, 10)["pools"]["run"]
    assert (never["cpu_hours"], never["attempts"], never["idle_share"]) == (0.0, 0, None)


def test_of_real_records() -> None:
    usages = parse_usage(recorded("sacct-usage-22.05.txt"))
    found = summarize(usages, [submission("1", "control", "fleet", "run"), submission("4", "run", job="run+1")], 100)
    assert set(found["pools"]) == {"control", "fleet", "run", "unknown"}
    assert found["pools"]["fleet"]["gpu_hours"] == pytest.approx((187 + 60) / 3600, abs=1e-6)
    assert found["pools"]["control"]["attempts"] == 2
    assert 0.99 < found["total"]["idle_share"] <= 1


@pytest.mark.parametrize(
    ("client", "reason"),
    [(FakeSlurm(error=SlurmUnavailable("sacct: no answer")), "sacct: no answer"), (FakeSlurm(), "does not know")],
)
async def test_where_accounting_says_nothing_nothing_is_said(client: FakeSlurm, reason: str) -> None:
    found = await account(client, HET, 500)
    assert (found["pools"], found["total"]) == (None, None)
    assert reason in found["reason"]


async def test_where_there_is_no_accounting_that_is_the_reason() -> None:
    client = FakeSlurm()
    client.used = None
    assert (await account(client, HET, 500))["reason"] == "this site keeps no accounts (sacct is off)"
    assert "not submitted" in (await account(client, [], 500))["reason"]
    assert client.calls == {"accounting": 1}
