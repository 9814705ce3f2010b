"""The configuration files of a test cluster as text: pure functions of what it looks like and where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster.binaries import Binaries
from tests.support.cluster.owner import AS_ROOT, ME, SERVICE
from tests.support.cluster.spec import NAME, ClusterSpec


@dataclass(frozen=True)
class Places:
    """Every path of a cluster below its root."""

    root: Path

    @property
    def conf(self) -> Path:
        """slurm.conf: what SLURM_CONF names, and by that what all our processes are known by."""
        return self.root / "etc" / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.root / "run" / "munge.socket"

    @property
    def database_socket(self) -> Path:
        return self.root / "mysql" / "mysqld.sock"

    def log(self, daemon: str) -> Path:
        return self.root / "log" / f"{daemon}.log"

    def pid(self, daemon: str) -> Path:
        return self.root / "run" / f"{daemon}.pid"

    def share(self, user: str) -> Path:
        """The user's own directory on what plays the shared filesystem."""
        return self.root / "share" / user


def slurm_conf(spec: ClusterSpec, places: Places, *, host: str, ports: range, binaries: Binaries) -> str:
    """slurm.conf for the cluster.

    Args:
        spec: what it looks like.
        places: where it lies.
        host: this machine's short name.
        ports: free ports: controller, database daemon, then one a node.
        binaries: Slurm's programs.
    """
    controller = [
        *(["preempt_send_user_signal"] if spec.signal_preempted else []),
        *([spec.controller] if spec.controller else []),
        *(["rl_enable", spec.rate_limit] if spec.rate_limit else []),
    ]
    lines = [
        f"ClusterName={NAME}",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        f"SlurmUser={SERVICE}",
        *([] if AS_ROOT else [f"SlurmdUser={ME}"]),
        "AuthType=auth/munge",
        # A requeued job waits until its old credential has expired: 120 s by default.
        f"AuthInfo=socket={places.munge_socket},cred_expire=5",
        f"StateSaveLocation={places.root}/spool/ctld",
        f"SlurmdSpoolDir={places.root}/spool/%n",
        f"SlurmctldPidFile={places.pid('slurmctld')}",
        f"SlurmdPidFile={places.root}/run/slurmd-%n.pid",
        f"SlurmctldLogFile={places.log('slurmctld')}",
        f"SlurmdLogFile={places.root}/log/slurmd-%n.log",
        *([f"SlurmctldParameters={','.join(controller)}"] if controller else []),
        # A changed slurm.conf is read by `scontrol reconfigure`; without this each node complains until then.
        "DebugFlags=NO_CONF_HASH",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=5",
        "MpiDefault=none",
        "ReturnToService=2",
        f"SlurmdTimeout={spec.slurmd_timeout_s}",
        "SlurmctldTimeout=30",
        "InactiveLimit=0",
        f"KillWait={spec.kill_wait_s}",
        f"MinJobAge={spec.min_job_age_s}",
        "CompleteWait=0",
        "JobRequeue=1",
        "MaxArraySize=1001",
        "PropagateResourceLimits=NONE",
        "SlurmdParameters=config_overrides",  # believe the declared CPUs, not this machine's
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "DefMemPerCPU=500",
        "GresTypes=gpu",
        "SchedulerType=sched/backfill",
        f"SchedulerParameters=bf_interval={spec.bf_interval_s},{spec.scheduler}".rstrip(","),
        "PriorityType=priority/multifactor",
        "PriorityDecayHalfLife=0-01:00:00",
        "PriorityCalcPeriod=00:01:00",
        "PriorityMaxAge=0-01:00:00",
        "PriorityWeightAge=1000",
        "PriorityWeightFairshare=10000",
        "PriorityWeightJobSize=100",
        "PriorityWeightPartition=1000",
        "PriorityWeightQOS=1000",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        *_plugins(binaries),
        *(_accounting(places, ports) if spec.accounting else ["AccountingStorageType=accounting_storage/none"]),
        *_nodes(spec, host, ports),
        *_partitions(spec),
    ]
    return "\n".join(lines) + "\n"


def _plugins(binaries: Binaries) -> list[str]:
    return [f"PluginDir={binaries.plugins}"] if binaries.plugins else []


def _accounting(places: Places, ports: range) -> list[str]:
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={ports[1]}",
        f"AccountingStoragePass={places.munge_socket}",
        "AccountingStorageEnforce=associations,limits,qos",
        "AccountingStorageTRES=gres/gpu",
        "AccountingStoreFlags=job_comment",
    ]


def _nodes(spec: ClusterSpec, host: str, ports: range) -> list[str]:
    lines = []
    for node, port in zip(spec.nodes, ports[2:], strict=True):
        kind = node[:3]
        gres = f" Gres=gpu:fake:{spec.gpus}" if kind == "gpu" else ""
        lines.append(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={spec.cpus} "
            f"RealMemory={spec.memory_mib}{gres} Feature={kind} State=UNKNOWN"
        )
    return lines


def _partitions(spec: ClusterSpec) -> list[str]:
    def partition(name: str, nodes: str, rest: str) -> str:
        return f"PartitionName={name} Nodes={nodes} MaxTime=1-00:00:00 DefaultTime=10 State=UP {rest}"

    lines = [
        partition("preempt", "ALL", f"PriorityTier=1 PreemptMode={spec.preempt_mode} GraceTime={spec.grace_s}"),
        partition("high", "ALL", "PriorityTier=20 PreemptMode=OFF"),
    ]
    if spec.cpu_nodes:
        rest = "Default=YES PriorityTier=10 PriorityJobFactor=10 PreemptMode=OFF"
        lines.append(partition("cpu", f"cpu[1-{spec.cpu_nodes}]", rest))
    if spec.gpu_nodes:
        rest = "PriorityTier=10 PriorityJobFactor=20 PreemptMode=OFF"
        lines.append(partition("gpu", f"gpu[1-{spec.gpu_nodes}]", rest))
    return lines


def gres_conf(spec: ClusterSpec, places: Places) -> str:
    """gres.conf: a GPU has to be a character device, and a link to /dev/null is one."""
    nodes = [node for node in spec.nodes if node.startswith("gpu")]
    files = f"{places.root}/dev/fakegpu[0-{spec.gpus - 1}]"
    return "".join(f"NodeName={node} Name=gpu Type=fake File={files}\n" for node in nodes)


def cgroup_conf(version: tuple[int, int]) -> str:
    """cgroup.conf: from 23.11 slurmd wants a cgroup even where it tracks by /proc, unless told otherwise."""
    return "CgroupPlugin=disabled\n" if version >= (23, 11) else "CgroupAutomount=no\n"


def slurmdbd_conf(places: Places, *, host: str, port: int, binaries: Binaries) -> str:
    """slurmdbd.conf; the database's socket reaches the library by MYSQL_UNIX_PORT, as there is no key for it."""
    return "\n".join(
        [
            f"DbdHost={host}",
            "DbdAddr=127.0.0.1",
            f"DbdPort={port}",
            f"SlurmUser={SERVICE}",
            "AuthType=auth/munge",
            f"AuthInfo=socket={places.munge_socket}",
            f"LogFile={places.log('slurmdbd')}",
            f"PidFile={places.pid('slurmdbd')}",
            "DebugLevel=info",
            "StorageType=accounting_storage/mysql",
            "StorageHost=localhost",
            "StorageUser=root",
            "StorageLoc=slurm_acct",
            *_plugins(binaries),
            "",
        ]
    )


def accounts(spec: ClusterSpec) -> str:
    """What `sacctmgr load` reads: one account a group of users, equal shares, root as administrator."""
    lines = [
        f"Cluster - '{NAME}':Fairshare=1:QOS='normal'",
        "Parent - 'root'",
        "User - 'root':DefaultAccount='root':AdminLevel='Administrator':Fairshare=1",
    ]
    users = spec.users if AS_ROOT else {ME: next(iter(spec.users.values()))}
    names = sorted(set(users.values()))
    lines += [f"Account - '{name}':Description='{name}':Organization='{NAME}':Fairshare=10" for name in names]
    for name in names:
        lines.append(f"Parent - '{name}'")
        lines += [f"User - '{user}':DefaultAccount='{name}':Fairshare=1" for user, own in users.items() if own == name]
    return "\n".join(lines) + "\n"
