"""A site as a value, for tests that need no Slurm: three partitions, of which others may push jobs out of one."""

from __future__ import annotations

from dataclasses import dataclass, field

from launch.slurm.client.protocol import NodeInfo, Partition, SiteInfo


@dataclass
class Nodes:
    """Nodes of one name, numbered from 1."""

    prefix: str
    count: int
    cpus: int
    mem_mib: int
    partitions: tuple[str, ...]
    gpus: int = 0
    state: str = "idle"
    features: tuple[str, ...] = field(default=())

    def all(self) -> list[NodeInfo]:
        return [
            NodeInfo(
                name=f"{self.prefix}{number}", state=self.state, cpus=self.cpus, idle_cpus=self.cpus,
                mem_mib=self.mem_mib, gpus=self.gpus, partitions=self.partitions, features=self.features,
            )
            for number in range(1, self.count + 1)
        ]  # fmt: skip


def site(
    *groups: Nodes, bf_interval_s: int = 30, max_time_min: int | None = 1440, grace_time_s: int = 5,
    preempt_mode: str = "REQUEUE", preempt_type: str = "preempt/partition_prio", max_nodes: int | None = None,
    kill_wait_s: int = 30, signals_preempted: bool = False,
) -> SiteInfo:  # fmt: skip
    """A site of these nodes; without any, five CPU nodes and two GPU nodes."""
    groups = groups or (
        Nodes("cpu", 5, 8, 16000, ("cpu", "preempt"), features=("cpu",)),
        Nodes("gpu", 2, 8, 16000, ("gpu", "preempt"), gpus=2, features=("gpu",)),
    )
    nodes = [node for group in groups for node in group.all()]
    names = dict.fromkeys(name for node in nodes for name in node.partitions)
    partitions = []
    for name in names:
        there = [node for node in nodes if name in node.partitions]
        preempts = name.startswith("preempt")
        partitions.append(
            Partition(
                name=name, default=name == next(iter(names)), nodes=tuple(node.name for node in there),
                cpus=max(node.cpus for node in there), mem_mib=max(node.mem_mib for node in there),
                gpus=max(node.gpus for node in there), max_time_min=max_time_min, max_nodes=max_nodes,
                preempt_mode=preempt_mode if preempts else "OFF", grace_time_s=grace_time_s if preempts else 0,
            )
        )  # fmt: skip
    return SiteInfo(
        cluster="mill", version=(22, 5, 8), partitions=tuple(partitions), nodes=tuple(nodes),
        bf_interval_s=bf_interval_s, preempt_type=preempt_type, kill_wait_s=kill_wait_s,
        signals_preempted=signals_preempted,
    )  # fmt: skip
