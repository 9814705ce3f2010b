"""What a configuration would start, as data and as text; starts and creates nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.convert import plain
from conf.load import digest, to_yaml
from conf.schema import Config


@dataclass(frozen=True)
class Planned:
    """Processes of one kind; `slots` is what one of them holds at once, None where that does not apply."""

    kind: str
    count: int
    slots: int | None = None


def processes(config: Config) -> tuple[Planned, ...]:
    """The processes of a run on this machine, in the order in which they are started."""
    pools = config.pools
    return (
        Planned("router", 1),
        Planned("replica", 0 if config.fleet.name == "external" else config.fleet.replicas),
        Planned("init", pools.init.workers, pools.init.slots),
        Planned("run", pools.run.workers, pools.run.slots),
        Planned("eval", pools.eval.workers, pools.eval.slots),
    )


def plan_text(config: Config) -> str:
    """One YAML document: the resolved configuration, its digest, the processes and the paths.

    A Slurm placement also gets its jobs, what checks say, the estimated start of every placement (where Slurm can be
    reached), and the batch scripts.
    """
    planned = {item.kind: _process(item) for item in processes(config)}
    plan: dict[str, Any] = {
        "placement": config.placement.name,
        "processes": planned,
        "processes_total": sum(item["count"] for item in planned.values()),
        "rollouts": "unknown" if config.task.limit is None else config.task.limit * config.group_size,
        "run_dir": str(config.run_path),
        "store": str(config.store_path),
        "config_digest": digest(config),
    }
    document: dict[str, Any] = {"plan": plan, "config": plain(config)}
    if config.placement.name == "local":
        return to_yaml(document)
    from launch.slurm import planning  # submitit's import takes a quarter of a second

    slurm = planning.make_plan(config)
    counts = planning.processes(slurm)
    plan["processes"] = {kind: item | {"count": counts.get(kind, 0)} for kind, item in planned.items()}
    plan["processes_total"] = sum(counts.values())
    plan["slurm"] = planning.as_data(slurm)
    return to_yaml(document) + _blocks("scripts", slurm.scripts)


def _blocks(key: str, texts: Mapping[str, Mapping[str, str]]) -> str:
    """YAML of texts two levels down, each as a literal block, so that it can be read and copied as it is."""
    lines = [f"{key}:"]
    for outer, inner in texts.items():
        lines.append(f"  {outer}:")
        lines += [f"    {name}: |\n{textwrap.indent(text, ' ' * 6)}" for name, text in inner.items()]
    return "\n".join(lines) + "\n"


def _process(item: Planned) -> dict[str, int]:
    return {"count": item.count} if item.slots is None else {"count": item.count, "slots": item.slots}
