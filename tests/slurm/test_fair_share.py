"""Two users of unequal usage: the heavier one's sweep waits behind the lighter one's run, and its status says why."""

from __future__ import annotations

import time

import pytest

from tests.slurm.jobs import QUICK, ClusterRun
from tests.support import runs
from tests.support.cluster import Cluster
from tests.support.waiting import poll

SLEEP = "#!/bin/bash\nexec sleep 600\n"
ALONE = ("placement=colocated", "cluster.partition=cpu", "cluster.extra_sbatch=['--exclusive']")
"""A run that takes a whole node: only one node is left to the two of them."""


def shown(cluster: Cluster, user: str, column: str) -> float:
    """What sshare says of the user, as Slurm last computed it."""
    rows = [line.split("|") for line in cluster.ask("sshare", "-nPa", f"--format=User,{column}").splitlines()]
    return next(float(found) for name, found in rows if name == user)


def factor(cluster: Cluster, user: str) -> float:
    return shown(cluster, user, "FairShare")


def used(cluster: Cluster, user: str) -> float:
    """CPU seconds, decayed."""
    return shown(cluster, user, "RawUsage")


def use_all_nodes_for_a_while(cluster: Cluster, user: str, other: str) -> None:
    """Slurm adds usage up once a minute (PriorityCalcPeriod): until then the job runs, and factors are of before."""
    for one in (user, other):
        account = f"account={cluster.spec.users[one]}"
        cluster.ask("sacctmgr", "-i", "modify", "user", "where", f"name={one}", account, "set", "rawusage=0")
    poll(lambda: used(cluster, user) == used(cluster, other) == 0, "neither has used anything", 30, 0.2)
    heavy = cluster.submit(user, SLEEP, "-pcpu", "-N5", "--exclusive")
    cluster.await_state(heavy, "RUNNING")
    poll(lambda: used(cluster, user) > 0, f"{user}'s usage is added up", 130, 1.0)
    assert factor(cluster, user) < factor(cluster, other)
    cluster.run("root", ["scancel", heavy], check=True)
    poll(lambda: set(cluster.queued(heavy).values()) == {"CANCELLED"}, "its nodes are free", 30, 0.2)


@pytest.mark.root
def test_the_heavier_users_sweep_waits_behind_the_lighter_ones_run(cluster: Cluster) -> None:
    use_all_nodes_for_a_while(cluster, "alice", "bob")
    blockers = [cluster.submit("root", SLEEP, "-pcpu", f"-N{nodes}", "--exclusive") for nodes in (4, 1)]
    for blocker in blockers:
        cluster.await_state(blocker, "RUNNING")
    words = ["experiment=demo", "run_dir=heavy", "task.limit=4", *QUICK, *ALONE]
    ended = cluster.rollmill("alice", *words, "-m", "sampling.temperature=0.7,1.0")
    assert ended.returncode == 0, ended.stderr
    points = [ClusterRun(cluster, f"heavy/{place}", groups=4) for place in range(2)]
    light = ClusterRun(cluster, "light", *ALONE, user="bob", groups=32, slow=True).submit()  # outlasts the questions
    waiting = {point.job for point in points}
    assert set(cluster.ask("squeue", "-ht", "PD", "-o", "%i").split()) == {*waiting, light.job}, "all of them wait"
    cluster.run("root", ["scancel", blockers[1]], check=True)
    cluster.await_state(light.job, "RUNNING", "COMPLETING", "COMPLETED")
    assert all(set(cluster.queued(job).values()) == {"PENDING"} for job in waiting), "though they came first"
    # On a busy machine the light run may end before the questions below: its node goes to somebody of more priority.
    cluster.submit("root", SLEEP, "-pcpu", "-N1", "--exclusive")

    status = points[0].status()
    (job,) = status["slurm"]["jobs"]
    assert (job["state"], job["reason"] in {"Priority", "Resources"}) == ("pending", True), job
    share = status["slurm"]["fair_share"]
    assert share["user"] == "alice" and 0 <= share["factor"] < factor(cluster, "bob")
    said = status["slurm"]["words"]
    assert any("fair-share factor" in line and "alice" in line for line in said), said
    assert any("cluster.partition=gpu" in line for line in said), "the gpu nodes are idle and would take it"
    assert job["estimated_start"] is None or job["estimated_start"] > time.time() - 60
    told = points[0].verb("status")
    assert f"fair-share factor {share['factor']:.2f}" in told and ("Priority" in told or "Resources" in told), told

    for point in points:
        point.verb("cancel")
    light.go_on()
    light.await_state("completed")
    assert runs.summary(light.place)["rollouts"]["completed"] == light.expected
