"""Workers that come and go on real Slurm, placement=auto that changes its mind, and what a sweep and status say."""

from __future__ import annotations

import json

import pytest

from tests.slurm.jobs import ClusterRun
from tests.support import runs
from tests.support.cluster import Cluster
from tests.support.waiting import poll


def run_workers(run: ClusterRun) -> set[str]:
    """Numbers of the RUN workers that are there."""
    return {member["id"].split("-")[1] for member in runs.members(run.place) if member["kind"] == "run"}


def test_scale_adds_workers_and_takes_them_away(cluster: Cluster) -> None:
    run = ClusterRun(cluster, "scaled", "placement=linked", "pools.run.slots=4", groups=32, slow=True).submit()
    run.await_rows(1)
    assert "2 more run workers" in run.verb("scale", "pools.run=+2")
    poll(lambda: run_workers(run) == {"1", "2", "3"}, "the added workers are there", 90, 0.5)
    added = run.submissions[-1]
    assert (added.workers, added.first, added.components) == (2, 2, ["run"])
    assert f"job {added.job_id}" in run.verb("scale", "pools.run=-1")
    poll(lambda: run_workers(run) == {"1"}, "they are gone again", 60, 0.5)
    run.go_on()
    run.await_state("completed")
    run.exactly_once()


def test_autoscale_grows_with_the_queue_within_its_bounds(cluster: Cluster) -> None:
    scaling = ["pools.run.slots=4", "pools.run.autoscale.max=1", "pools.run.autoscale.queue=8"]
    run = ClusterRun(cluster, "autoscaled", "placement=het", *scaling, groups=32, slow=True).submit()
    run.await_rows(1)
    poll(lambda: run_workers(run) == {"1", "2"}, "the pool has grown", 90, 0.5)
    run.go_on()
    run.await_state("completed")
    run.exactly_once()
    assert [one.workers for one in run.submissions if one.reason == "scale"] == [1]
    run.gone()


def test_a_sweep_submits_every_point_and_one_failure_hides_no_other(cluster: Cluster) -> None:
    words = ["experiment=demo", "placement=het", "task.limit=4", "run_dir=sweep", "-m", "cluster.partition=cpu,nowhere"]
    ended = cluster.rollmill("alice", *words)
    assert ended.returncode == 1
    assert "nowhere" in ended.stderr
    place = cluster.share("alice") / "sweep"
    poll(lambda: '"completed"' in _summary(place / "0"), "the good point ends", 150, 0.5)
    assert not list((place / "1" / "slurm").glob("*.json"))
    assert "cluster.partition=cpu" in ended.stdout and "cluster.partition=nowhere" in ended.stdout


def _summary(place: object) -> str:
    try:
        return (place / "report" / "summary.json").read_text()  # type: ignore[operator, no-any-return]
    except FileNotFoundError:
        return ""


def test_status_tells_why_a_run_waits_and_what_would_start_sooner(cluster: Cluster) -> None:
    cluster.submit("bob", "#!/bin/bash\nexec sleep 300\n", "-pcpu", "-N5", "--exclusive")
    run = ClusterRun(cluster, "waits", "placement=het", "cluster.partition=cpu", groups=4).submit()
    poll(lambda: run.status()["slurm"]["jobs"], "Slurm has the job", 30, 0.5)
    status = run.status()
    assert status["state"] == "starting"
    assert {job["state"] for job in status["slurm"]["jobs"]} == {"pending"}
    assert status["slurm"]["words"]
    told = run.verb("status")
    assert "Resources" in told or "Priority" in told
    assert run.verb("cancel")
    run.await_slurm(run.job, "CANCELLED")


@pytest.mark.root
def test_status_and_cancel_work_with_the_routers_port_blocked(cluster: Cluster) -> None:
    """A login node that cannot reach compute nodes: all is read from files and asked by them."""
    run = ClusterRun(cluster, "blocked", "placement=het", groups=96, slow=True).submit()
    run.await_rows(1)
    alone = ["unshare", "--net"]  # not even loopback is up in there
    command = str(cluster.python.with_name("rollmill"))
    words = [*alone, "setpriv", "--reuid=alice", "--regid=alice", "--clear-groups", command]
    status = cluster.run("root", [*words, "status", str(run.place), "--json"], env=cluster.env("alice"))
    assert json.loads(status.stdout)["rollouts"]["accepted"] == run.expected, status.stderr
    cancelled = cluster.run("root", [*words, "cancel", str(run.place)], env=cluster.env("alice"), timeout_s=120)
    assert cancelled.returncode == 0, cancelled.stderr
    run.await_slurm(run.job, "CANCELLED")
    run.gone()
