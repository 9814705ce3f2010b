"""Why a job waits, in words that name what to change."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launch.slurm.client.protocol import FairShare, JobInfo, NodeInfo, Partition, SiteInfo
from launch.slurm.client.states import job_state
from launch.slurm.words import explain, meaning

NOW = 1_000_000.0


def pending(reason: str | None, job_id: str = "9", **more: object) -> JobInfo:
    leader, _, offset = job_id.partition("+")
    base = {"state": job_state("PENDING"), "partition": "cpu", "node_count": 1, "cpus": 4, "time_limit_min": 30}
    return JobInfo(
        job_id=job_id, leader_id=leader, het_offset=int(offset) if offset else None, reason=reason, **{**base, **more}
    )  # type: ignore[arg-type]


def site(cpu_idle: int = 0, spare_idle: int = 0, **spare: object) -> SiteInfo:
    """Two partitions of four nodes with 8 CPUs, of which so many are idle."""
    nodes = [
        NodeInfo(name=f"{name}{number}", state="idle" if number < idle else "alloc", cpus=8, idle_cpus=0, mem_mib=1000,
                 partitions=(name,))
        for name, idle in (("cpu", cpu_idle), ("spare", spare_idle))
        for number in range(4)
    ]  # fmt: skip
    more = {"max_time_min": 60, **spare}
    return SiteInfo(
        cluster="c", version=(22, 5), nodes=tuple(nodes),
        partitions=(
            Partition(name="cpu", default=True, max_time_min=1440, max_nodes=8), Partition(name="spare", **more),
        ),
    )  # type: ignore[arg-type]  # fmt: skip


def said(*jobs: JobInfo, at: SiteInfo | None = None, share: FairShare | None = None, **names: str) -> str:
    return "\n".join(explain(jobs, at, share, components=names, now=NOW))


@pytest.mark.parametrize(
    ("reason", "words"),
    [("Priority", "higher priority"), ("Resources", "next in line"), ("QOSMaxCpuPerUserLimit", "one user have at once"),
     ("QOSGrpNodeLimit", "the qos is at its limit"), ("QOSMaxWallDurationPerJobLimit", "will not start as it is"),
     ("AssocGrpGRES", "your account is at its limit"), ("AssocGrpCpuLimit", "your account is at its limit"),
     ("AssocMaxJobsLimit", "all that your account lets you"), ("AssocMaxWallDurationPerJobLimit", "will not start so"),
     ("ReqNodeNotAvail, UnavailableNodes:cpu1", "down, drained or reserved"), ("ReqNodeNotAvail", "down, drained"),
     ("Dependency", "another job"), ("DependencyNeverSatisfied", "never start"), ("BeginTime", "start time"),
     ("PartitionTimeLimit", "above the partition's"), ("JobHeldUser", "scontrol release"),
     ("JobHeldAdmin", "administrator"), ("Licenses", "licence"), ("Reservation", "reservation"),
     ("BadConstraints", "no node has"), ("PartitionDown", "takes no jobs"), ("InvalidAccount", "cluster.account"),
     ("launch_failed_requeued_held", "scontrol release"), ("Prolog", "busy"), (None, "has not looked"),
     ("SomethingNew", "Slurm says SomethingNew")],
)  # fmt: skip
def test_reasons(reason: str | None, words: str) -> None:
    assert words in meaning(reason)


def test_nothing_is_said_where_nothing_waits() -> None:
    running = JobInfo(job_id="9", leader_id="9", state=job_state("RUNNING"))
    assert said(running, at=site(4), share=FairShare(user="a", account="p", factor=0.1)) == ""


def test_components_reason_and_estimate() -> None:
    text = said(
        pending("Resources", "9+0", estimated_start=int(NOW) + 600), pending("Resources", "9+1"),
        **{"9+0": "control", "9+1": "init"},
    )  # fmt: skip
    assert text.startswith("control (9+0), init (9+1) wait: Resources: it is next in line")
    assert "estimated start in 10 min" in text
    assert "queued again" in said(pending("BeginTime", restarts=1))
    assert "`scontrol release 12`" in said(pending("JobHeldUser", "12"))


def test_fair_share_is_given_with_what_it_means() -> None:
    low = FairShare(user="alice", account="physics", factor=0.1, share=0.4, usage=0.9)
    text = said(pending("Priority"), share=low)
    assert "fair-share factor 0.10 of 1 for alice in physics" in text
    assert "promised 40% of the cluster and used 90%" in text
    assert "users who have used less go first" in text
    assert "go first" not in said(pending("Priority"), share=FairShare(user="a", account="p", factor=0.9))
    assert "fair-share" not in said(pending("JobHeldUser"), share=low), "that is not why it waits"


def test_fewer_nodes_than_are_wanted_are_idle() -> None:
    text = said(pending("Resources", node_count=4, cpus=32), at=site(cpu_idle=2))
    assert "cpu has 2 idle nodes and 4 are wanted: fewer would start sooner" in text
    text = said(*(pending("Resources", f"9+{n}") for n in range(3)), at=site(cpu_idle=2))
    assert "cpu has 2 idle nodes and 3 are wanted" in text, "the components of one job want theirs at once"


def test_nodes_that_are_kept_for_a_job_count_where_it_waits_and_nowhere_else() -> None:
    def kept(at: SiteInfo, name: str) -> SiteInfo:
        state = {node: "plnd" if name in node.partitions and node.idle else node.state for node in at.nodes}
        return replace(at, nodes=tuple(replace(node, state=state[node]) for node in at.nodes))

    job = pending("Resources", node_count=4, cpus=32)
    assert "cpu has 2 idle nodes and 4 are wanted" in said(job, at=kept(site(cpu_idle=2), "cpu"))
    assert "spare" not in said(pending("Priority"), at=kept(site(spare_idle=2), "spare"))


def test_a_partition_with_idle_nodes_is_named() -> None:
    text = said(pending("Priority"), at=site(spare_idle=2))
    assert "partition spare has 2 idle nodes: cluster.partition=spare" in text
    assert "may be preempted (REQUEUE)" in said(pending("Priority"), at=site(spare_idle=2, preempt_mode="REQUEUE"))
    assert "spare" not in said(pending("Priority", time_limit_min=120), at=site(spare_idle=2)), "its limit is 60 min"
    assert "spare" not in said(pending("Priority", cpus=16), at=site(spare_idle=2)), "its nodes have 8 CPUs"
    assert "spare" not in said(pending("Priority", gpus=1), at=site(spare_idle=2)), "its nodes have no GPU"
    assert "spare" not in said(pending("Priority"), at=site(spare_idle=2, up=False))


def test_a_shorter_limit_backfills() -> None:
    assert "below 120 min fits into more gaps" in said(pending("Priority", time_limit_min=120), at=site())
    assert "gaps" not in said(pending("Priority", time_limit_min=30), at=site())


def test_what_can_never_start_says_what_would_be_taken() -> None:
    text = said(pending("PartitionTimeLimit", time_limit_min=3065), at=site())
    assert "a time limit of at most 1440 min would be taken: partition cpu allows no more" in text
    text = said(pending("PartitionNodeLimit", node_count=9), at=site())
    assert "at most 8 nodes would be taken" in text


def test_heterogeneous_jobs_have_a_way_out() -> None:
    assert "placement=linked" in said(pending("Resources", "9+0"), at=site())
    assert "placement=linked" not in said(pending("Resources", "9"), at=site())
