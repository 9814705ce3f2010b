"""Public bugs of the field on a real cluster: runs that fail, another user on the node, a job that never starts."""

from __future__ import annotations

import json

import pytest

from tests.slurm.jobs import ClusterRun
from tests.support.cluster import Cluster


@pytest.mark.parametrize("placement", ["het", "linked"])
def test_b19_a_run_that_fails_is_failed_everywhere(cluster: Cluster, placement: str) -> None:
    """An engine that never answers: the router's job is FAILED, and the command says why."""
    run = ClusterRun(cluster, f"fails-{placement}", f"placement={placement}", "retry.max_attempts=1", "fleet=external",
                     "fleet.urls=[http://127.0.0.1:9]", groups=4)  # fmt: skip
    ended = cluster.rollmill(run.user, *run._words, "action=run")
    assert ended.returncode == 1
    assert "none of 16 rollouts completed; the first failed by" in ended.stderr.splitlines()[-1]
    assert run.state() == "failed"
    run.await_slurm(run.job, "FAILED")
    run.gone()


@pytest.mark.root
def test_b24_another_user_cannot_use_the_router(cluster: Cluster) -> None:
    run = ClusterRun(cluster, "guarded", "placement=het", groups=24, slow=True).submit()
    run.await_rows(1)
    url = json.loads(run.layout.router_json.read_text())["url"]
    asks = f"import urllib.request as u; print(u.urlopen('{url}/v1/status').status)"
    ended = cluster.run("bob", [str(cluster.python), "-c", asks])
    assert "401" in ended.stderr
    assert cluster.run("bob", ["cat", str(run.layout.trainer_token)]).returncode != 0
    run.verb("cancel")


def test_b27_auto_leaves_het_after_the_configured_wait(cluster: Cluster) -> None:
    """All but two nodes are taken: a job of five components waits, linked ones share the nodes that are left."""
    cluster.submit("bob", "#!/bin/bash\nexec sleep 300\n", "-pcpu", "-N3", "--exclusive", "-wcpu[1-3]")
    run = ClusterRun(
        cluster, "auto", "placement=auto", "cluster.het_max_pending_s=20", "cluster.partition=cpu", groups=8
    )
    het, fallback = run.submit().submitted
    assert (het.placement, fallback.placement) == ("het", "linked")
    run.await_state("completed")
    run.exactly_once()
    assert {one.placement for one in run.submissions} == {"linked"}
    run.await_slurm(het.job_id, "CANCELLED")


def test_b27_auto_takes_het_where_that_starts_in_time(cluster: Cluster) -> None:
    run = ClusterRun(cluster, "auto-het", "placement=auto", "cluster.het_max_pending_s=600", groups=8).submit()
    _, fallback = run.submitted
    run.await_state("completed")
    run.exactly_once()
    assert [one.placement for one in run.submissions] == ["het"]
    run.await_slurm(fallback.job_id, "CANCELLED")
