"""What Slurm does to jobs in mid-run: requeue, signals, preemption, limits, lost nodes. Every rollout exactly once."""

from __future__ import annotations

import json

import pytest

from stages.shards.reader import ShardReader
from stages.shards.rows import ShardRow
from tests.slurm.jobs import TURNS, ClusterRun, wasted_tokens
from tests.support import runs
from tests.support.agents import told_after
from tests.support.cluster import Cluster
from tests.support.waiting import poll

pytestmark = pytest.mark.timeout(420, func_only=True)
"""A requeued job waits some ten seconds, a lost node is noticed after half a minute, a time limit is a minute."""

LONG = 28
"""Groups of a run that is still going when something happens to it: seven waves of slow rollouts."""


def carried_on(run: ClusterRun, attempts: int = 2, timeout_s: float = 180) -> None:
    """The run came to its end in a later attempt: nothing lost or doubled, no step done twice or on another's files."""
    poll(run.layout.attempt_logs(attempts).is_dir, f"attempt {attempts} of {run.place.name}", timeout_s, 0.2)
    run.go_on()
    run.await_state("completed")
    run.exactly_once()
    assert runs.summary(run.place)["attempt"] >= attempts
    assert {last_told(row) for row in ShardReader(run.place)} == {told_after(TURNS - 1)}
    run.gone()


def last_told(row: ShardRow) -> str:
    """What the agent's last step printed."""
    return str([said["content"] for said in json.loads(row["messages"]) if said["role"] == "user"][-1])


@pytest.mark.parametrize("placement", ["het", "linked"])
def test_scontrol_requeue(cluster: Cluster, placement: str) -> None:
    words = (f"placement={placement}", "checkpoint.turns=1")
    run = ClusterRun(cluster, f"requeue-{placement}", *words, groups=LONG, slow=True)
    run.submit().await_rows(12)
    cluster.run("root", ["scontrol", "requeue", run.job], check=True)
    carried_on(run)


@pytest.mark.parametrize("continue_by", ["requeue", "resubmit"])
def test_usr2_to_the_batch_shell_drains_and_goes_on(cluster: Cluster, continue_by: str) -> None:
    """As before a time limit: what was sampled before the drain is not sampled again."""
    words = ("placement=het", f"cluster.continue_by={continue_by}")
    run = ClusterRun(cluster, f"usr2-{continue_by}", *words, groups=LONG, slow=True)
    run.submit().await_rows(12)
    first = run.job
    cluster.run("alice", ["scancel", "--signal=USR2", "--batch", first], check=True)
    carried_on(run)
    assert wasted_tokens(run) == 0
    assert (run.job == first) == (continue_by == "requeue")


def test_usr2_to_the_steps_alone_drains_and_goes_on(cluster: Cluster) -> None:
    run = ClusterRun(cluster, "usr2-steps", "placement=het", "checkpoint.turns=1", groups=LONG, slow=True)
    run.submit().await_rows(12)
    cluster.run("alice", ["scancel", "--signal=USR2", run.job], check=True)
    carried_on(run)


def test_preemption_by_a_higher_partition(cluster: Cluster) -> None:
    run = ClusterRun(cluster, "preempted", "placement=het", "cluster.partition=preempt", groups=LONG, slow=True)
    run.submit().await_rows(12)
    nodes = sorted({member["node"] for member in runs.members(run.place)})
    thief = cluster.submit("bob", "#!/bin/bash\nsleep 1\n", "-phigh", f"-w{nodes[0]}", "--exclusive")
    poll(lambda: cluster.states(thief).get(thief) == "COMPLETED", "the higher job ran", 90, 0.3)
    carried_on(run)


def test_preemption_that_cancels_and_that_the_steps_alone_hear_of(cluster: Cluster) -> None:
    """PreemptMode=CANCEL without preempt_send_user_signal: the run goes on as a job of its own making."""
    keys = ["cluster.continue_by=resubmit", "cluster.partition=preempt", "checkpoint.turns=1"]
    with cluster.changed(preempt_mode="CANCEL", signal_preempted=False, grace_s=20):
        run = ClusterRun(cluster, "preempted-away", "placement=het", *keys, groups=24, slow=True).submit()
        run.await_rows(4)
        first, node = run.job, min(member["node"] for member in runs.members(run.place))
        cluster.submit("bob", "#!/bin/bash\nsleep 1\n", "-phigh", f"-w{node}", "--exclusive")
        carried_on(run)
    assert run.job != first
    assert [one.reason for one in run.submissions] == ["launch", "continue"]


@pytest.mark.timeout(480, func_only=True)
def test_a_time_limit_shorter_than_the_work_is_normal(cluster: Cluster) -> None:
    limits = [f"{part}.time_min=1" for part in ("pools.init", "pools.run", "pools.eval", "fleet")]
    run = ClusterRun(cluster, "limit", "placement=het", *limits, groups=90, slow=True)
    carried_on(run.submit(), timeout_s=300)
    assert wasted_tokens(run) == 0


@pytest.mark.parametrize("placement", ["het", "linked"])
def test_a_node_is_lost(cluster: Cluster, placement: str) -> None:
    words = (f"placement={placement}", "checkpoint.turns=1")
    run = ClusterRun(cluster, f"lost-{placement}", *words, groups=LONG, slow=True)
    run.submit().await_rows(12)
    node = next(member["node"] for member in runs.members(run.place) if member["kind"] == "run")
    cluster.kill_node(node)
    cluster.await_node(node, "down*", timeout_s=60)
    cluster.start_node(node)
    run.go_on()
    run.await_state("completed", timeout_s=170)
    run.exactly_once()


def test_the_node_of_a_linked_jobs_batch_shell_is_lost(cluster: Cluster) -> None:
    """The job goes on by its other node without a leader (`--no-kill`): another is submitted, and ends it."""
    apart = ["cluster.partition=cpu", "pools.run.partition=gpu", "pools.run.nodes=2"]
    words = ("placement=linked", "checkpoint.turns=1", *apart)
    run = ClusterRun(cluster, "headless", *words, groups=90, slow=True).submit()
    run.await_rows(12)
    first = next(one for one in run.submissions if one.job == "run")
    node = next(member["node"] for member in runs.members(run.place) if member["id"].startswith("run-1-"))
    cluster.kill_node(node)
    cluster.await_node(node, "down*", timeout_s=60)
    poll(lambda: [one for one in run.submissions if one.job == "run" and one.reason == "continue"], "a successor", 120)
    assert cluster.states(first.job_id)[first.job_id] == "RUNNING", "it does its work meanwhile"
    cluster.start_node(node)
    run.await_slurm(first.job_id, "CANCELLED")
    run.go_on()
    run.await_state("completed", timeout_s=170)
    run.exactly_once()
    run.gone()
