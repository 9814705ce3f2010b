"""Whether a site can give what jobs ask for, and how it would treat them: partitions, nodes, preemption, backfill."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from conf.schema import Config
from launch.slurm.client.protocol import NodeInfo, Partition, SiteInfo
from launch.slurm.findings import Finding, section_of
from launch.slurm.shapes import Component, Job

DRAIN_S = 30
"""What a worker's drain takes: half a turn's grace, the commit of what it holds, and the router's last words."""
SLOW_BACKFILL_S = 60
"""An interval of the backfill scheduler above which a heterogeneous job's start is worth a word."""


def fit(config: Config, job: Job, site: SiteInfo) -> list[Finding]:
    """What the site has to say about a job, refusals and warnings."""
    found = [one for component in job.components for one in _fits(config, component, site)]
    if job.het and not any(one.fatal for one in found):
        found += _apart(config, job, site)
    return [*found, *_manners(config, job, site)]


def is_preemptible(site: SiteInfo, partition: str | None) -> bool:
    """Whether jobs there may be taken off their nodes for others; of several partitions, in one of them."""
    return any(_preempts(site, found) for found in site.partitions_of(partition))


def _preempts(site: SiteInfo, partition: Partition) -> bool:
    return site.preempt_type != "preempt/none" and _mode(partition, site) not in {"", "OFF"}


def _fits(config: Config, component: Component, site: SiteInfo) -> list[Finding]:
    """Whether the component can ever be had there, alone; of several partitions one is enough."""
    names = [component.partition] if component.partition is None else component.partition.split(",")
    unknown = [name for name in names if site.partition(name) is None]  # sbatch refuses the whole list for one of them
    found = [list(_fits_in(config, component, site, name)) for name in unknown[:1] or names]
    return min(found, key=lambda some: (any(one.fatal for one in some), bool(some)))


def _fits_in(config: Config, component: Component, site: SiteInfo, name: str | None) -> Iterator[Finding]:
    section = section_of(component)
    partition = site.partition(name)
    if partition is None:
        key = f"{section}.partition"
        named = name or "no partition, and the site has no default one"
        names = ", ".join(part.name for part in site.partitions)
        yield Finding(key, f"{key} got {named}; this site has {names}")
        return
    if not partition.up:
        yield Finding(section, f"partition {partition.name} of {section} is down: the job would wait", fatal=False)
    limit, asked = partition.max_time_min, component.time_min
    if limit is not None and asked is not None and asked > limit:
        key = f"{section}.time_min"
        yield Finding(key, f"{key} got {asked}; partition {partition.name} allows {limit}: runs go on after a limit")
    if partition.max_nodes is not None and component.nodes > partition.max_nodes:
        key = f"{section}.nodes"
        yield Finding(
            key, f"{key} got {component.nodes}; partition {partition.name} allows {partition.max_nodes} a job"
        )
    candidates = _candidates(config, component, partition, site)
    if len(candidates) < component.nodes:
        yield Finding(f"{section}.nodes", _too_few(config, component, partition, site, len(candidates)))
    elif sum(node.usable for node in candidates) < component.nodes:
        yield Finding(
            f"{section}.nodes",
            f"{section} asks for {component.nodes} nodes of partition {partition.name}, of which "
            f"{sum(node.usable for node in candidates)} are in service now: the job would wait for the others",
            fatal=False,
        )


def _candidates(config: Config, component: Component, partition: Partition, site: SiteInfo) -> list[NodeInfo]:
    """The nodes that could take one node's part of the component, also those out of service."""
    constraint = config.cluster.constraint
    # Only a plain feature name is understood here; an expression is left to Slurm.
    feature = constraint if constraint and re.fullmatch(r"[\w.-]+", constraint) else None
    return [
        node
        for node in site.nodes_of(partition.name)
        if node.name not in config.cluster.exclude
        and node.cpus >= component.cpus_per_task
        and (component.mem_mib is None or node.mem_mib >= component.mem_mib)
        and node.gpus >= component.gpus
        and (feature is None or feature in node.features)
    ]


def _too_few(config: Config, component: Component, partition: Partition, site: SiteInfo, have: int) -> str:
    """Says which figure is too large, where it is one alone."""
    section = section_of(component)
    nodes = site.nodes_of(partition.name)
    sizes = (
        ("CPUs", "cpus_per_task", component.cpus_per_task, [node.cpus for node in nodes]),
        ("MiB", "mem_gib", component.mem_mib or 0, [node.mem_mib for node in nodes]),
        ("GPUs", "gpus_per_replica", component.gpus, [node.gpus for node in nodes]),
    )
    for unit, key, asked, sizes_there in sizes:
        if sum(size >= asked for size in sizes_there) < component.nodes:
            largest = max(sizes_there, default=0)
            if asked > largest:
                return (
                    f"{section} asks for {asked} {unit} a node (of all its processes there); the largest node of "
                    f"partition {partition.name} has {largest}; lower {section}.{key} or the processes a node"
                )
    return (
        f"{section} asks for {component.nodes} nodes of partition {partition.name}, where {have} of {len(nodes)} have "
        f"what it asks for (constraint and exclude counted); lower {section}.nodes or what it asks of a node"
    )


def _apart(config: Config, job: Job, site: SiteInfo) -> Iterator[Finding]:
    """Each component of a heterogeneous job needs nodes of its own, also where CPUs are idle.

    Hall's condition: there are enough exactly if every set of components has, together, as many candidates as it asks.
    """
    pools: dict[str, frozenset[str]] = {}
    for component in job.components:
        partitions = site.partitions_of(component.partition)
        nodes = [node for partition in partitions for node in _candidates(config, component, partition, site)]
        pools[component.name] = frozenset(node.name for node in nodes)
    for size in range(2, len(job.components) + 1):
        for some in itertools.combinations(job.components, size):
            asked = sum(component.nodes for component in some)
            have = len(frozenset().union(*(pools[component.name] for component in some)))
            if have < asked:
                names = ", ".join(component.name for component in some)
                yield Finding(
                    "placement",
                    f"placement=het needs {asked} nodes for {names}, as each component has nodes of its own, and there "
                    f"are {have} that could take them; use placement=colocated or linked, or other partitions",
                )
                return


def _manners(config: Config, job: Job, site: SiteInfo) -> Iterator[Finding]:
    """What will go badly, though it can be had."""
    for component in job.components:
        partition = next((one for one in site.partitions_of(component.partition) if _preempts(site, one)), None)
        if partition is not None:
            yield from _preempted(config, job, component, partition, site)
    if job.het and site.bf_interval_s >= SLOW_BACKFILL_S:
        yield Finding(
            "placement",
            f"placement=het starts only in the backfill scheduler's rounds, here {site.bf_interval_s} s or more apart; "
            "placement=linked starts at once where nodes are idle",
            fatal=False,
        )


def _preempted(
    config: Config, job: Job, component: Component, partition: Partition, site: SiteInfo
) -> Iterator[Finding]:
    """What preemption would do to a component."""
    mode, key = _mode(partition, site), f"{section_of(component)}.partition"
    there = f"{key} {partition.name}"
    if "SUSPEND" in mode or "GANG" in mode:
        yield Finding(
            key,
            f"{there} suspends preempted jobs: their leases run out and their rollouts start again elsewhere; "
            "take a partition that requeues",
            fatal=False,
        )
    elif partition.grace_time_s < DRAIN_S and config.checkpoint.turns != 1:
        yield Finding(
            key,
            f"{there} gives a preempted job {partition.grace_time_s} s (GraceTime), a drain takes up to {DRAIN_S} s: "
            "turns since the last checkpoint may be done again; set checkpoint.turns=1",
            fatal=False,
        )
    elif not site.signals_preempted and site.kill_wait_s < DRAIN_S and config.checkpoint.turns != 1:
        yield Finding(
            key,
            f"{there} tells a preempted job only by SIGTERM (SlurmctldParameters has no preempt_send_user_signal), and "
            f"KillWait is {site.kill_wait_s} s where a drain takes up to {DRAIN_S} s: turns since the last checkpoint "
            "may be done again; set checkpoint.turns=1",
            fatal=False,
        )
    if mode == "CANCEL" and config.cluster.continue_by == "requeue":
        yield Finding(
            "cluster.continue_by",
            f"{there} cancels preempted jobs and never queues them again; set cluster.continue_by=resubmit",
            fatal=False,
        )
    if job.het:
        yield Finding(
            "placement",
            f"{there} is preemptible: with placement=het losing one component stops them all, and all must be free at "
            "once to go on; placement=linked goes on with the rest",
            fatal=False,
        )


def _mode(partition: Partition, site: SiteInfo) -> str:
    """What preemption does to a job there; the partition's own word counts where it has one."""
    return (partition.preempt_mode or site.preempt_mode).upper()
