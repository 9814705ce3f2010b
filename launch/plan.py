"""What a configuration would start, as data and as text; starts and creates nothing."""

from __future__ import annotations

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
    """One YAML document: the resolved configuration, its digest, the processes and the paths."""
    planned = processes(config)
    document: dict[str, Any] = {
        "plan": {
            "placement": config.placement.name,
            "processes": {item.kind: _process(item) for item in planned},
            "processes_total": sum(item.count for item in planned),
            "rollouts": "unknown" if config.task.limit is None else config.task.limit * config.group_size,
            "run_dir": str(config.run_path),
            "store": str(config.store_path),
            "config_digest": digest(config),
        },
        "config": plain(config),
    }
    return to_yaml(document)


def _process(item: Planned) -> dict[str, int]:
    return {"count": item.count} if item.slots is None else {"count": item.count, "slots": item.slots}
