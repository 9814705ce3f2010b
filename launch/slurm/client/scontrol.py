"""scontrol and sinfo: one job by its id, and what a site is. Pure: how their lines are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from launch.slurm.client import fields
from launch.slurm.client.protocol import JobInfo, NodeInfo, Partition, SiteInfo
from launch.slurm.client.states import job_state

_PAIR = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_/:]*)=")
_CONFIG = re.compile(r"(\w+)\s+= (.*)")
_AGE_S: Final = 7 * 86400.0
"""Slurm's own PriorityMaxAge."""
NODE_COLUMNS: Final = "%N|%R|%t|%c|%m|%C|%G|%f"


def pairs(line: str) -> dict[str, str]:
    """The `Key=value` pairs of one line of `scontrol --oneliner`; a value runs to the next key and may hold spaces."""
    found = list(_PAIR.finditer(line))
    ends = [match.start() for match in found[1:]] + [len(line)]
    values: dict[str, str] = {}
    for match, end in zip(found, ends, strict=True):
        # A comment may hold what looks like a key: the first of a name is Slurm's own.
        values.setdefault(match[1], line[match.end() : end].strip())
    return values


def parse_jobs(out: str) -> list[JobInfo]:
    """The jobs of `scontrol --oneliner show job ID`: of a heterogeneous leader all components."""
    return [_job(pairs(line)) for line in out.splitlines() if line.startswith("JobId=")]


def _job(said: Mapping[str, str]) -> JobInfo:
    state = job_state(said["JobState"])
    leader, number = fields.text(said.get("HetJobId")), said["JobId"]
    offset = fields.number(said.get("HetJobOffset")) or 0
    starts = fields.unix_time(said.get("StartTime"))
    code, ended_by = fields.exit_pair(said.get("ExitCode"))
    amounts = said.get("TRES") or said.get("AllocTRES") or said.get("ReqTRES")
    return JobInfo(
        job_id=f"{leader}+{offset}" if leader else number, leader_id=leader or number,
        het_offset=offset if leader else None, name=said.get("JobName", ""),
        user=said.get("UserId", "").partition("(")[0], account=fields.text(said.get("Account")),
        partition=said.get("Partition", ""), qos=fields.text(said.get("QOS")), comment=fields.text(said.get("Comment")),
        state=state, reason=fields.text(said.get("Reason")) or None, nodes=fields.node_names(said.get("NodeList")),
        node_count=fields.number(said.get("NumNodes", "").partition("-")[0]) or 0,
        cpus=fields.number(said.get("NumCPUs", "").partition("-")[0]) or 0, gpus=fields.gpus_in_tres(amounts),
        submitted_at=fields.unix_time(said.get("SubmitTime")), eligible_at=fields.unix_time(said.get("EligibleTime")),
        started_at=None if state.waiting else starts,
        ended_at=None if state.waiting else fields.unix_time(said.get("EndTime")),
        estimated_start=starts if state.waiting else None, time_limit_min=fields.limit_min(said.get("TimeLimit")),
        priority=fields.number(said.get("Priority")), restarts=fields.number(said.get("Restarts")) or 0,
        exit_code=code, exit_signal=ended_by, source="scontrol",
    )  # fmt: skip


def parse_config(out: str) -> dict[str, str]:
    """`scontrol show config` by key."""
    return {match[1]: match[2].strip() for line in out.splitlines() if (match := _CONFIG.match(line))}


def parse_nodes(out: str) -> tuple[NodeInfo, ...]:
    """Nodes of `sinfo --Node` in NODE_COLUMNS; a node stands there once a partition."""
    rows: dict[str, list[list[str]]] = {}
    for line in out.splitlines():
        values = line.split("|")
        if len(values) == 8:
            rows.setdefault(values[0], []).append(values)
    return tuple(_node(name, lines) for name, lines in rows.items())


def _node(name: str, lines: Sequence[Sequence[str]]) -> NodeInfo:
    _, _, state, cpus, memory, usage, gres, features = lines[0]
    allotted_idle_other_total = [fields.number(part) or 0 for part in usage.split("/")]
    return NodeInfo(
        name=name,
        # sinfo's marks: * does not answer, ~ # ! % powering, $ maintenance, @ ^ reboots, - planned.
        state=state.lower().rstrip("*~#!%$@^-+"), cpus=fields.number(cpus) or 0,
        idle_cpus=allotted_idle_other_total[1] if len(allotted_idle_other_total) == 4 else 0,
        mem_mib=fields.memory_mib(memory.rstrip("+")) or 0, gpus=fields.gpus_in_gres(gres), gres=fields.text(gres),
        features=tuple(part for part in fields.text(features).split(",") if part),
        partitions=tuple(dict.fromkeys(line[1] for line in lines)),
    )  # fmt: skip


def parse_partitions(out: str, nodes: Sequence[NodeInfo]) -> tuple[Partition, ...]:
    """Partitions of `scontrol --oneliner show partition`, with the most that a node of each has."""
    lines = [pairs(line) for line in out.splitlines() if line.startswith("PartitionName=")]
    return tuple(_partition(line, nodes) for line in lines)


def _partition(said: Mapping[str, str], nodes: Sequence[NodeInfo]) -> Partition:
    name = said["PartitionName"]
    own = [node for node in nodes if name in node.partitions]
    return Partition(
        name=name, default=said.get("Default") == "YES", up=said.get("State") == "UP",
        nodes=fields.node_names(said.get("Nodes")) if said.get("Nodes") != "ALL" else tuple(node.name for node in own),
        cpus=max((node.cpus for node in own), default=0), mem_mib=max((node.mem_mib for node in own), default=0),
        gpus=max((node.gpus for node in own), default=0),
        gres=next((node.gres for node in own if node.gpus), next((node.gres for node in own if node.gres), "")),
        max_time_min=fields.limit_min(said.get("MaxTime")), max_nodes=fields.number(said.get("MaxNodes")),
        grace_time_s=fields.number(said.get("GraceTime")) or 0,
        preempt_mode=said.get("PreemptMode", "OFF"),
    )  # fmt: skip


def site(config_out: str, partitions_out: str, nodes_out: str) -> SiteInfo:
    """A site from its three outputs."""
    config = parse_config(config_out)
    nodes = parse_nodes(nodes_out)
    age_most = fields.number(config.get("PriorityWeightAge")) or 0
    size_most = fields.number(config.get("PriorityWeightJobSize")) or 0
    scheduler = dict(part.partition("=")[::2] for part in config.get("SchedulerParameters", "").split(","))
    return SiteInfo(
        cluster=config.get("ClusterName", ""), version=version(config.get("SLURM_VERSION", "")),
        partitions=parse_partitions(partitions_out, nodes), nodes=nodes,
        preempt_type=fields.text(config.get("PreemptType")) or "preempt/none",
        preempt_mode=config.get("PreemptMode", "OFF"), bf_interval_s=fields.number(scheduler.get("bf_interval")) or 30,
        accounting="slurmdbd" in config.get("AccountingStorageType", ""),
        kill_wait_s=_seconds(config, "KillWait", 30),
        age_most=age_most,
        age_points=age_most / (fields.seconds(config.get("PriorityMaxAge")) or _AGE_S),
        size_most=0 if config.get("PriorityFavorSmall", "").lower() == "yes" else size_most,
        signals_preempted="preempt_send_user_signal" in config.get("SlurmctldParameters", "").lower().split(","),
    )  # fmt: skip


def version(said: str) -> tuple[int, ...]:
    """The numbers of "22.05.8" or "slurm-wlm 24.11.5"."""
    match = re.search(r"\d+(?:\.\d+)+", said)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _seconds(config: Mapping[str, str], key: str, otherwise: int) -> int:
    """A time of `show config`, written "30 sec"; the manual's default where it is missing."""
    found = fields.number(config.get(key, "").partition(" ")[0])
    return otherwise if found is None else found
