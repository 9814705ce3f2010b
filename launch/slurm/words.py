"""Why a job waits and what would start it sooner, in words. Pure: from the jobs, the site and the user's fair-share.

Slurm's reasons are listed in its manual (squeue, "JOB REASON CODES"). What is said is one sentence a fact, and never a
promise: the scheduler decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from launch.slurm.client.protocol import FairShare, JobInfo, NodeInfo, SiteInfo
from launch.slurm.client.states import JobState

LOW_FACTOR: Final = 0.35
"""Fair-share factor below which a user's jobs are behind those of most others (0.5 has used exactly its share)."""
SHORT_MIN: Final = 60
"""A time limit at or below this fits most gaps that backfill finds."""

_REASONS: Final[tuple[tuple[str, str], ...]] = (
    (r"Priority", "jobs of higher priority are before it"),
    (r"Resources", "it is next in line, and no nodes are free for it yet"),
    (r"None", "the scheduler has not looked at it yet"),
    (r"Dependency", "it waits for another job to end"),
    (r"DependencyNeverSatisfied", "it waits for a job that ended otherwise: it will never start; cancel it"),
    (r"BeginTime", "its start time has not come yet; after a requeue that is a pause of up to two minutes"),
    (r"JobHeldUser", "it is held; `scontrol release ID` lets it go"),
    (r"JobHeldAdmin", "an administrator holds it; only they can release it"),
    (r"JobHoldMaxRequeue", "it was requeued too often, and Slurm holds it; `scontrol release ID` lets it go"),
    (r"launch_failed_requeued_held", "it could not be launched, and Slurm holds it; `scontrol release ID` tries again"),
    (r"PartitionTimeLimit", "its time limit is above the partition's: it will not start as it is"),
    (r"PartitionNodeLimit", "it asks for more nodes than the partition gives one job: it will not start as it is"),
    (r"PartitionDown|PartitionInactive", "its partition takes no jobs now"),
    (r"PartitionConfig", "it asks for what the partition does not give: it will not start as it is"),
    (r"AccountNotAllowed", "its account may not use this partition; set another account or partition"),
    (r"QOSNotAllowed", "its qos may not be used in this partition; set another qos or partition"),
    (r"InvalidAccount", "its account is not known; set cluster.account"),
    (r"InvalidQOS", "its qos is not known; set cluster.qos"),
    (r"BadConstraints", "no node has what it asks for: it will not start as it is"),
    (r"NodeDown|ReqNodeNotAvail.*", "nodes that it needs are down, drained or reserved"),
    (r"Licenses|.*License.*", "a licence that it asks for is in use"),
    (r"Reservation.*", "its reservation has not begun, or nothing in it is free"),
    (r"Cleaning", "its last attempt is still being cleaned up"),
    (r"NodesBusy|FrontEndDown|SystemFailure|Prolog", "Slurm is busy with the nodes"),
    (r"QOS(Max|Grp)\w*PerUser\w*|QOSMax\w*PerUser\w*", "you use all that the qos lets one user have at once"),
    (r"QOSMax\w*(Wall|PerJob|PerNode)\w*", "it asks for more than the qos gives one job: it will not start as it is"),
    (r"QOS\w*", "the qos is at its limit; it starts when other jobs of that qos end"),
    (r"AssocMax\w*(Wall|PerJob|PerNode)\w*", "it asks for more than your account gives one job: it will not start so"),
    (r"Assoc(Max|MaxJobs)\w*", "you use all that your account lets you have at once"),
    (r"Assoc\w*", "your account is at its limit; it starts when other jobs of that account end"),
    (r"Max\w*PerAccount\w*", "your account uses all that it may have at once"),
    (r"Het_?[Jj]ob\w*|HetJob\w*", "the components of a heterogeneous job start together, and one has no nodes yet"),
    (r"FedJobLock|DeadLine\w*|JobArrayTaskLimit", "Slurm holds it back by a rule of the site"),
    (r"NonZeroExitCode", "its last attempt failed"),
)  # fmt: skip
_QUEUED: Final = frozenset({"Priority", "Resources", "None"})


def meaning(reason: str | None) -> str:
    """What a reason means; an unknown one is given as Slurm wrote it."""
    word = (reason or "None").partition(",")[0].strip("()")
    for pattern, means in _REASONS:
        if re.fullmatch(pattern, word):
            return means
    return f"Slurm says {reason}"


def explain(
    jobs: Sequence[JobInfo],
    site: SiteInfo | None,
    share: FairShare | None,
    *,
    components: Mapping[str, str],
    now: float,
) -> list[str]:
    """Sentences about the jobs that wait; none where none does.

    Args:
        jobs: all jobs of the run.
        site: what the cluster is and has free, or None where it could not be asked.
        share: the user's fair-share, or None where the site keeps none.
        components: names of the components by job id, such as {"9+1": "init"}.
        now: unix seconds.
    """
    waiting = [job for job in jobs if job.state.waiting]
    if not waiting:
        return []
    lines = _waits(waiting, components, now)
    queued = [job for job in waiting if (job.reason or "None") in _QUEUED]
    if queued and share is not None:
        lines += _fair_share(share)
    if site is not None:
        lines += _limits(waiting, site)
        lines += _sooner(queued, site)
    return list(dict.fromkeys(lines))


def _waits(waiting: Sequence[JobInfo], components: Mapping[str, str], now: float) -> list[str]:
    """One line a reason, with the components that it holds up."""
    by_reason: dict[str | None, list[JobInfo]] = {}
    for job in waiting:
        by_reason.setdefault(job.reason, []).append(job)
    lines = []
    for reason, jobs in by_reason.items():
        names = ", ".join(dict.fromkeys(f"{components.get(job.job_id, 'job')} ({job.job_id})" for job in jobs))
        said = meaning(reason).replace(" ID`", f" {jobs[0].leader_id}`")
        verb = "waits" if len(jobs) == 1 else "wait"
        starts = [job.estimated_start for job in jobs if job.estimated_start and job.estimated_start > now]
        when = f"; estimated start in {_span(max(starts) - now)}" if starts else ""
        again = " (queued again)" if any(job.restarts or job.state is JobState.REQUEUED for job in jobs) else ""
        lines.append(f"{names} {verb}{again}: {reason or 'no reason yet'}: {said}{when}")
    return lines


def _fair_share(share: FairShare) -> list[str]:
    if share.factor is None:
        return []
    said = f"fair-share factor {share.factor:.2f} of 1 for {share.user} in {share.account}"
    if share.share is not None and share.usage is not None:
        said += f": the account is promised {share.share:.0%} of the cluster and used {share.usage:.0%} of late"
    if share.factor < LOW_FACTOR:
        said += "; users who have used less go first, and the factor recovers as time passes"
    return [said]


def _limits(waiting: Sequence[JobInfo], site: SiteInfo) -> list[str]:
    """What can never start as it is."""
    lines = []
    for job in waiting:
        part = site.partition(job.partition)
        limit = part.max_time_min if part else None
        if part and limit is not None and (job.time_limit_min or 0) > limit:
            lines.append(f"a time limit of at most {limit} min would be taken: partition {part.name} allows no more")
        if part and part.max_nodes is not None and job.node_count > part.max_nodes:
            lines.append(f"at most {part.max_nodes} nodes would be taken: partition {part.name} gives a job no more")
        if part and not part.up:
            lines.append(f"partition {part.name} is closed: another one would start it")
    return lines


def _sooner(queued: Sequence[JobInfo], site: SiteInfo) -> list[str]:
    """What would start it sooner: fewer nodes, a shorter limit, another partition, no heterogeneous job."""
    lines: list[str] = []
    for part_name in dict.fromkeys(job.partition for job in queued):
        jobs = [job for job in queued if job.partition == part_name]
        wanted = sum(max(1, job.node_count) for job in _together(jobs))
        free = _fitting(site.nodes_of(part_name), jobs, planned=True)
        if free >= wanted:
            lines.append(f"{part_name} has {free} idle nodes and {wanted} are wanted: it may start at any moment")
            continue
        if free:
            lines.append(f"{part_name} has {free} idle nodes and {wanted} are wanted: fewer would start sooner")
        for part in site.partitions:
            there = _fitting(site.nodes_of(part.name), jobs)
            usable = part.up and part.name != part_name and there >= wanted and _fits(jobs, part.max_time_min)
            if usable:
                taken = "" if part.preempt_mode == "OFF" else f", where jobs may be preempted ({part.preempt_mode})"
                lines.append(f"partition {part.name} has {there} idle nodes{taken}: cluster.partition={part.name}")
    longest = max((job.time_limit_min or 0 for job in queued), default=0)
    if longest > SHORT_MIN:
        lines.append(f"a time limit below {longest} min fits into more gaps: backfill starts short jobs early")
    if any(job.het_offset is not None for job in queued):
        lines.append(
            f"a heterogeneous job starts by backfill alone, every {site.bf_interval_s} s, when all its components fit "
            "at once; placement=linked starts each when it can"
        )
    return lines


def _together(jobs: Sequence[JobInfo]) -> Sequence[JobInfo]:
    """The jobs that need nodes at the same time: the components of one job, or the largest of several jobs."""
    if any(job.het_offset is not None for job in jobs):
        return jobs
    return [max(jobs, key=lambda job: job.node_count)]


def _fitting(nodes: Sequence[NodeInfo], jobs: Sequence[JobInfo], *, planned: bool = False) -> int:
    """Idle nodes that have the CPUs and GPUs which the largest of these jobs wants of one node.

    `planned` counts those too that backfill keeps for a job: in the partition where these wait it may be one of them.
    """
    cpus = max((-(-job.cpus // max(1, job.node_count)) for job in jobs), default=0)
    gpus = max((-(-job.gpus // max(1, job.node_count)) for job in jobs), default=0)
    free = [node for node in nodes if node.idle or (planned and node.state in {"plnd", "planned"})]
    return sum(node.cpus >= cpus and node.gpus >= gpus for node in free)


def _fits(jobs: Sequence[JobInfo], max_time_min: int | None) -> bool:
    return max_time_min is None or all((job.time_limit_min or 0) <= max_time_min for job in jobs)


def _span(seconds: float) -> str:
    """Seconds as people read them."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{round(seconds)} s"
    if minutes < 120:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    return f"{hours} h" if hours < 48 else f"{round(seconds / 86400)} days"
