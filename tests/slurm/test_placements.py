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
    run = ClusterRun(cluster, "five", "placement=het", groups=8, slow=True).submit()
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
    run.go_on()
    run.await_state("completed")
