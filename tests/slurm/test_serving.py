"""A service on the cluster: a trainer streams from it while its jobs are requeued, and it stays until it is told."""

from __future__ import annotations

import pytest

from stages.client import RolloutClient
from tests.slurm.jobs import ClusterRun
from tests.support import runs
from tests.support.cluster import Cluster

pytestmark = pytest.mark.timeout(420, func_only=True)

GROUPS, TASKS = 20, 8


def test_a_service_serves_across_a_requeue_until_it_is_drained(cluster: Cluster) -> None:
    """The trainer's loop has no code of its own for the requeue: each group comes once, from either attempt."""
    words = ("placement=het", "workflow=serve", "checkpoint.turns=1")
    run = ClusterRun(cluster, "service", *words, groups=TASKS, slow=True).submit()
    cluster.await_state(run.job, "RUNNING")
    tasks = [{"task_id": f"arith-0-{number % TASKS}"} for number in range(GROUPS)]
    seen: list[str] = []
    with RolloutClient(run.place, patience_s=300) as client:
        for group in client.stream(tasks, 2, in_flight=6, tag="train"):
            seen.append(group.group_id)
            assert len(group.rows) == 2 and group.tag == "train"
            if len(seen) == 4:
                cluster.run("root", ["scontrol", "requeue", run.job], check=True)
                run.go_on()
    assert len(seen) == len(set(seen)) == GROUPS
    closed = [line["group_id"] for line in runs.index(run.place) if line["type"] == "group"]
    assert sorted(closed) == sorted(seen)
    assert run.state() in {"", "requeued"}, "it waits for the next request"
    run.verb("drain")
    run.await_state("completed")
    summary = runs.summary(run.place)
    assert (summary["attempt"], summary["rollouts"]["completed"]) == (2, GROUPS * 2)
    run.await_slurm(run.job, "COMPLETED")
    run.gone()
