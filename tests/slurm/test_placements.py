"""The demo on real Slurm, by every placement, as an ordinary user: to the end, and with the truth in accounting."""

from __future__ import annotations

import pytest

from tests.slurm.jobs import ClusterRun
from tests.support import runs
from tests.support.cluster import Cluster

COMPONENTS = {"het": 1, "linked": 5, "colocated": 1}


@pytest.mark.parametrize("placement", sorted(COMPONENTS))
def test_the_demo_runs_to_its_end(cluster: Cluster, placement: str) -> None:
    run = ClusterRun(cluster, placement, f"placement={placement}", "control.cpus_per_task=1").submit()
    assert len(run.submissions) == COMPONENTS[placement]
    run.await_state("completed")
    run.exactly_once()
    assert runs.summary(run.place)["reward"]["mean"] >= 0.9
    for submission in run.submissions:
        run.await_slurm(submission.job_id, "COMPLETED")
    run.gone()


def test_het_has_five_components_that_each_start_at_once(cluster: Cluster) -> None:
    run = ClusterRun(cluster, "five", "placement=het").submit()
    run.await_rows(1)
    assert set(cluster.queued(run.job)) == {f"{run.job}+{number}" for number in range(5)}
    assert sorted({member["kind"] for member in runs.members(run.place)}) == [
        "eval",
        "init",
        "replica",
        "router",
        "run",
    ]
    assert len({member["node"] for member in runs.members(run.place)}) == 5
    run.await_state("completed")


@pytest.mark.parametrize("placement", ["het", "linked"])
def test_b19_a_run_that_fails_is_failed_everywhere(cluster: Cluster, placement: str) -> None:
    """A model that cannot be loaded on the nodes: the router's job is FAILED, and the command says why."""
    run = ClusterRun(cluster, f"fails-{placement}", f"placement={placement}", "stuck_after_s=5", "fleet=external",
                     "fleet.urls=[http://127.0.0.1:9]", groups=4)  # fmt: skip
    ended = cluster.rollmill(run.user, *run._words, "action=run")
    assert ended.returncode == 1
    assert "none of 16 rollouts completed; the first failed by llm" in ended.stderr.splitlines()[-1]
    assert run.state() == "failed"
    run.await_slurm(run.job, "FAILED")
    run.gone()
