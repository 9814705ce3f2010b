"""Which Slurm jobs a run is made of, as data: components, the steps that start in them, the processes on every node.

A component is what Slurm allots: nodes of one shape. A step is one task a node, a node agent that starts and supervises
the processes of that node; its words (`Share`) say which. Pure: no Slurm, no file, no clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from conf.schema import Config, Pool

SlurmPlacement = Literal["het", "linked", "colocated"]
PoolName = Literal["init", "run", "eval"]

SIGNAL_S = 90
"""Seconds before the time limit at which a job is told: a drain's grace, a checkpoint's fsync and Slurm's own delay."""

_SHARE = re.compile(r"([a-z]+)=(\d+),(\d+)-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Share:
    """Processes of one kind in a step: `per_node` on every node, numbered `first` to `last` over all nodes.

    As a word of the step's command line: `run=2,1-4` is two RUN workers a node, numbers 1 to 4 over both nodes. The
    last node may hold fewer.
    """

    kind: str
    per_node: int
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.kind}={self.per_node},{self.first}-{self.last}"

    @classmethod
    def parse(cls, word: str) -> Share:
        """The share that a word says.

        Raises:
            ValueError: no such word.
        """
        match = _SHARE.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is no share of a step; wanted KIND=PER_NODE,FIRST-LAST, as in run=2,1-4")
        return cls(kind=match[1], per_node=int(match[2]), first=int(match[3]), last=int(match[4]))

    @property
    def all_numbers(self) -> range:
        """The numbers of its processes on all nodes."""
        return range(self.first, self.last + 1)

    def numbers_on(self, node: int) -> range:
        """The numbers of the processes on the step's node of this rank (0 is the first)."""
        begin = self.first + node * self.per_node
        return range(begin, max(begin, min(begin + self.per_node, self.last + 1)))


@dataclass(frozen=True, kw_only=True)
class Component:
    """Nodes of one shape; all figures are for one node, `time_min` in minutes; None leaves the site's default."""

    name: str
    """control, init, run, eval, fleet or all."""
    kinds: tuple[tuple[str, int], ...]
    """Process kind (router, init, run, eval, replica) and how many of it a node."""
    nodes: int
    cpus_per_task: int
    mem_mib: int | None
    gpus: int
    partition: str | None
    account: str | None
    qos: str | None
    time_min: int | None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One srun: a task a node on the first `nodes` nodes of a component; `cpus` and `gpus` a node."""

    component: int
    name: str
    nodes: int
    cpus: int
    gpus: int
    argv: tuple[str, ...]
    """What follows `python -P -u -m`: launch.slurm.step RUN_DIR NAME SHARE..."""
    shared: bool = False
    """Other steps of this job use the same nodes."""

    @property
    def shares(self) -> tuple[Share, ...]:
        """The processes that it starts."""
        return tuple(map(Share.parse, self.argv[3:]))


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one sbatch submits."""

    name: str
    """het, colocated, or the component's name; of an added job the pool and which addition it is, as in run+1."""
    components: tuple[Component, ...]
    steps: tuple[Step, ...]
    het: bool
    no_kill: bool
    """Whether it goes on when one of its nodes is lost: a linked job of several nodes.

    Never with `het`, of which only half would come back, nor with the router, which the lost node may have held.
    """

    @property
    def nodes(self) -> int:
        """Nodes of all components."""
        return sum(component.nodes for component in self.components)

    @property
    def signal_s(self) -> int:
        """Seconds before the time limit at which the batch shell gets USR2: at most a third of the shortest limit."""
        limits = [component.time_min * 60 for component in self.components if component.time_min is not None]
        return max(1, min([SIGNAL_S, *(limit // 3 for limit in limits)]))


def jobs_of(config: Config, placement: SlurmPlacement) -> tuple[Job, ...]:
    """The jobs of a resolved configuration, in the order in which they are submitted: the router's is the first."""
    if placement == "colocated":
        return (_colocated(config),)
    parts = _parts(config)
    if placement == "linked":
        return tuple(_linked(config, component, shares) for component, shares in parts)
    # The first component to reach its limit ends them all, and sbatch would hand a limit on to those that name none.
    longest = _longest(config)
    parts = [(replace(part, time_min=longest), shares) for part, shares in parts]
    steps = (_step(config, place, component, shares) for place, (component, shares) in enumerate(parts))
    return (Job(name="het", components=tuple(part for part, _ in parts), steps=tuple(steps), het=True, no_kill=False),)


def added_job(
    config: Config, pool: PoolName, workers: int, first: int, *, nth: int = 1, partition: str | None = None
) -> Job:
    """A linked job with further workers of one pool, numbered from `first`; a node holds as many as the pool's do.

    Args:
        config: the run's.
        pool: which pool grows.
        workers: how many more in all.
        first: the number of the first of them: one that no worker of the run has had.
        nth: which addition to this pool it is, from 1.
        partition: where; None: the pool's.
    """
    keys: Pool = getattr(config.pools, pool)
    per_node = min(keys.workers, workers)
    nodes = math.ceil(workers / per_node)
    share = Share(kind=pool, per_node=per_node, first=first, last=first + workers - 1)
    component = _pool(config, pool, share, nodes, partition)
    return _linked(config, component, (share,), name=f"{pool}+{nth}")


def _parts(config: Config) -> list[tuple[Component, tuple[Share, ...]]]:
    """Every component with what runs in it: control, the pools, and the fleet where it is ours."""
    control = Share(kind="router", per_node=1, first=1, last=1)
    parts: list[tuple[Component, tuple[Share, ...]]] = [(_control(config), (control,))]
    names: tuple[PoolName, ...] = ("init", "run", "eval")
    for name in names:
        keys: Pool = getattr(config.pools, name)
        share = Share(kind=name, per_node=keys.workers, first=1, last=keys.workers * keys.nodes)
        parts.append((_pool(config, name, share, keys.nodes), (share,)))
    if config.fleet.name != "external":
        component, share = _fleet(config)
        parts.append((component, (share,)))
    return parts


def _control(config: Config) -> Component:
    control, cluster = config.control, config.cluster
    return Component(
        name="control",
        kinds=(("router", 1),),
        nodes=1,
        cpus_per_task=control.cpus_per_task,
        mem_mib=_mib(control.mem_gib),
        gpus=0,
        partition=control.partition or cluster.partition,
        account=cluster.account,
        qos=cluster.qos,
        time_min=_longest(config),
    )


def _pool(config: Config, name: PoolName, share: Share, nodes: int, partition: str | None = None) -> Component:
    keys: Pool = getattr(config.pools, name)
    return Component(
        name=name,
        kinds=((name, share.per_node),),
        nodes=nodes,
        cpus_per_task=share.per_node * keys.cpus_per_task,
        mem_mib=_times(share.per_node, keys.mem_gib),
        gpus=0,
        partition=partition or keys.partition or config.cluster.partition,
        account=keys.account or config.cluster.account,
        qos=keys.qos or config.cluster.qos,
        time_min=keys.time_min,
    )


def _replicas(config: Config, nodes: int) -> Share:
    replicas = config.fleet.replicas
    return Share(kind="replica", per_node=math.ceil(replicas / nodes), first=1, last=replicas)


def _fleet(config: Config) -> tuple[Component, Share]:
    """The engines: several a node, or one over several nodes, each with its part of the replica's GPUs."""
    fleet, cluster = config.fleet, config.cluster
    # The embedded engine is one process; more nodes than replicas would stand idle.
    spans = fleet.nodes // fleet.replicas if fleet.name == "vllm" and fleet.nodes > fleet.replicas else 1
    if spans > 1:
        share = Share(kind="replica", per_node=1, first=1, last=spans * fleet.replicas)
    else:
        share = _replicas(config, min(fleet.nodes, fleet.replicas))
    component = Component(
        name="fleet",
        kinds=(("replica", share.per_node),),
        nodes=math.ceil(share.last / share.per_node),
        cpus_per_task=share.per_node * fleet.cpus_per_task,
        mem_mib=_times(share.per_node, fleet.mem_gib),
        gpus=share.per_node * math.ceil(fleet.gpus_per_replica / spans),
        partition=fleet.partition or cluster.partition,
        account=fleet.account or cluster.account,
        qos=fleet.qos or cluster.qos,
        time_min=fleet.time_min,
    )
    return component, share


def _colocated(config: Config) -> Job:
    """One job whose every node runs all pools and its share of the fleet; the first runs the router too."""
    pools, fleet = config.pools, config.fleet
    own_fleet = fleet.name != "external"
    nodes = max(pools.init.nodes, pools.run.nodes, pools.eval.nodes, *([fleet.nodes] if own_fleet else []))
    shares = [
        Share(kind=kind, per_node=keys.workers, first=1, last=keys.workers * nodes)
        for kind, keys in (("init", pools.init), ("run", pools.run), ("eval", pools.eval))
    ]
    parts = [(pools.init.workers, pools.init), (pools.run.workers, pools.run), (pools.eval.workers, pools.eval)]
    cpus = sum(count * keys.cpus_per_task for count, keys in parts)
    memory = [_times(count, keys.mem_gib) for count, keys in parts]
    gpus = 0
    if own_fleet:
        share = _replicas(config, nodes)
        shares.append(share)
        cpus += share.per_node * fleet.cpus_per_task
        memory.append(_times(share.per_node, fleet.mem_gib))
        gpus = share.per_node * fleet.gpus_per_replica
    control = _control(config)
    component = Component(
        name="all",
        kinds=(("router", 1), *((share.kind, share.per_node) for share in shares)),
        nodes=nodes,
        cpus_per_task=cpus + control.cpus_per_task,
        mem_mib=_sum([*memory, control.mem_mib]),
        gpus=gpus,
        partition=_first(_wanted(config, "partition")),
        account=_first(_wanted(config, "account")),
        qos=_first(_wanted(config, "qos")),
        time_min=_longest(config),
    )
    router = Share(kind="router", per_node=1, first=1, last=1)
    all_cpus = component.cpus_per_task
    steps = (
        Step(component=0, name="control", nodes=1, cpus=all_cpus, gpus=0,
             argv=_argv(config, "control", (router,)), shared=True),
        Step(component=0, name="all", nodes=nodes, cpus=all_cpus, gpus=gpus,
             argv=_argv(config, "all", shares), shared=True),
    )  # fmt: skip
    return Job(name="colocated", components=(component,), steps=steps, het=False, no_kill=False)


def _linked(config: Config, component: Component, shares: Sequence[Share], name: str | None = None) -> Job:
    # The step bears the job's name, not the pool's: logs of an added job must not be those of another's node 0.
    step = _step(config, 0, component, shares, name)
    # A job of one node has nothing left when that is lost: there the plain requeue is the better way back.
    no_kill = component.nodes > 1
    return Job(name=name or component.name, components=(component,), steps=(step,), het=False, no_kill=no_kill)


def _step(config: Config, place: int, component: Component, shares: Sequence[Share], name: str | None = None) -> Step:
    name = name or component.name
    return Step(
        component=place,
        name=name,
        nodes=component.nodes,
        cpus=component.cpus_per_task,
        gpus=component.gpus,
        argv=_argv(config, name, shares),
    )


def _argv(config: Config, name: str, shares: Iterable[Share]) -> tuple[str, ...]:
    return ("launch.slurm.step", str(config.run_path), name, *map(str, shares))


def wanted(config: Config, key: str) -> list[str]:
    """Every value that the configuration's components name themselves for partition, account or qos, in order."""
    places = [config.pools.run, config.pools.init, config.pools.eval, config.control]
    places += [config.fleet] if config.fleet.name != "external" else []
    found = [getattr(place, key, None) for place in places]
    return list(dict.fromkeys(value for value in found if value))


def _wanted(config: Config, key: str) -> list[str | None]:
    return [*wanted(config, key), getattr(config.cluster, key)]


def _first(values: Iterable[str | None]) -> str | None:
    return next((value for value in values if value), None)


def _longest(config: Config) -> int | None:
    """The router is there as long as any other component."""
    places = [config.pools.init, config.pools.run, config.pools.eval]
    limits = [place.time_min for place in places]
    limits += [config.fleet.time_min] if config.fleet.name != "external" else []
    return max((limit for limit in limits if limit is not None), default=None)


def _mib(gib: float | None) -> int | None:
    return None if gib is None else math.ceil(gib * 1024)


def _times(count: int, gib: float | None) -> int | None:
    return None if gib is None else math.ceil(count * gib * 1024)


def _sum(parts: Iterable[int | None]) -> int | None:
    """MiB of all parts; None where one of them leaves it to the site, as what the others add to that is not known."""
    known = list(parts)
    return None if any(part is None for part in known) else sum(part or 0 for part in known)
