"""Cancelling at any point: by the command and by Slurm's own, nothing of a run is left, and all call it cancelled."""

from __future__ import annotations

import os
import random

import pytest

from tests.slurm.jobs import ClusterRun
from tests.support.cluster import Cluster
from tests.support.waiting import poll

POINTS = int(os.environ.get("ROLLMILL_TEST_CANCEL_POINTS", "3"))
"""Moments for each way of cancelling; more by hand."""


@pytest.mark.parametrize("point", range(POINTS))
@pytest.mark.parametrize("by", ["rollmill", "scancel"])
def test_b08_cancel_at_a_random_point(cluster: Cluster, by: str, point: int) -> None:
    dice = random.Random(f"{by}-{point}")
    placement = dice.choice(["het", "linked", "colocated"])
    run = ClusterRun(cluster, f"cancel-{by}-{point}", f"placement={placement}", groups=96, slow=True).submit()
    until = dice.choice([0, 0, 1, 20, 60])
    if until:
        run.await_rows(until)
    ids = [one.job_id for one in run.submissions]
    if by == "rollmill":
        assert "cancel" in run.verb("cancel")
    else:
        cluster.run("alice", ["scancel", *ids], check=True)
    for job in ids:
        run.await_slurm(job, "CANCELLED")
    run.gone()
    poll(lambda: run.status()["state"] == "cancelled", "status says cancelled", 30, 0.5)
