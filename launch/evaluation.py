"""workflow=evaluate: on a fleet of its own, or as a guest of a serving run beside its training traffic."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from conf.errors import ConfigError
from conf.load import load_config
from conf.schema import Config
from launch import wiring
from launch.errors import Exit
from launch.opening import open_run
from stages import manifest, sharedfs
from stages.client import AsyncRolloutClient
from stages.layout import RunLayout
from stages.summary import write_summary
from workflows.evaluate import evaluate, report, score


async def evaluate_config(client: AsyncRolloutClient, config: Config, layout: RunLayout) -> dict[str, Any]:
    """Evaluate what the config names through a router; leaves report/evaluation.json and returns it.

    Every rollout draws from a seed of its own, made of the run's seed, its task and its place in the group, so that an
    evaluation is repeated draw by draw, whatever else the run does meanwhile.
    """
    task = wiring.build_task(config)
    as_guest = config.evaluate.run_dir is not None
    tasks = [_task(row, with_data=as_guest) for row in task.rows()]
    found = await asyncio.to_thread(manifest.read, layout)
    run_id = found.run_id if found is not None else ""
    sampling = dataclasses.asdict(config.sampling)
    chosen = {name: sampling[name] for name in ("temperature", "top_p", "max_tokens")}
    chosen["seed"] = config.sampling.seed if config.sampling.seed is not None else config.seed
    began = await client.policy()
    rows = await evaluate(
        client, tasks, k=config.evaluate.k, tag=config.evaluate.tag, priority=config.evaluate.priority, sampling=chosen,
        key=f"evaluate-{run_id}", max_open=config.admission.max_open,
    )  # fmt: skip
    k = config.evaluate.k
    scores = [score(rows[at]["task_id"], rows[at : at + k]) for at in range(0, len(rows), k)]
    versions = [row["min_policy_version"] for row in rows if row["min_policy_version"] is not None]
    made = report(
        scores, k, run_id=run_id, run_dir=config.evaluate.run_dir or str(layout.root), task=task.name,
        tag=config.evaluate.tag, sampling=chosen, policy_version=began["version"],
        min_policy_version=min(versions, default=None), max_policy_version=max(versions, default=None),
    )  # fmt: skip
    path = layout.report / "evaluation.json"
    await asyncio.to_thread(sharedfs.write_atomic, path, msgspec.json.format(msgspec.json.encode(made), indent=2))
    return made


def _task(row: Mapping[str, Any], *, with_data: bool) -> dict[str, Any]:
    return {"task_id": row["task_id"], **({"data": dict(row)} if with_data else {})}


def table(made: dict[str, Any]) -> str:
    """The report for people: the estimates, then a line a task."""
    lines = [f"pass@{k:<4} {_interval(found)}" for k, found in made["pass_at_k"].items()]
    mean = made["mean_reward"]
    lines.append(f"reward    {'-' if mean is None else format(mean, '.4f')} mean of {made['rollouts']} rollouts")
    if made["masked"]:
        lines.append(f"masked    {made['masked']} rollouts, {made['tasks_without_result']} tasks without any result")
    width = max((len(one["task_id"]) for one in made["per_task"]), default=4)
    lines.append(f"{'task':<{width}}  right  counted  masked  pass@1")
    lines += [
        f"{one['task_id']:<{width}}  {one['correct']:>5}  {one['n']:>7}  {one['masked']:>6}  "
        f"{'-' if one['pass_at_1'] is None else format(one['pass_at_1'], '.3f')}"
        for one in made["per_task"]
    ]
    return "\n".join(lines) + "\n"


def _interval(found: dict[str, Any] | None) -> str:
    if found is None:
        return "no task has so many rollouts that count"
    return f"{found['value']:.4f}  (95 %: {found['low']:.4f} to {found['high']:.4f}, {found['tasks']} tasks)"


async def evaluate_as_guest(config: Config) -> int:
    """Evaluate on another run's fleet; started again with the same run directory it goes on where it was.

    Raises:
        ConfigError: that run rolls another task out, or is none.
    """
    host = Path(config.evaluate.run_dir or "")
    await asyncio.to_thread(_check_host, config, host)
    layout, began = RunLayout(config.run_path), time.monotonic()
    opened = await open_run(config, layout)
    if opened.state == "finished":
        report = layout.report / "evaluation.json"
        sys.stdout.write(table(msgspec.json.decode(await asyncio.to_thread(sharedfs.read_bytes, report))))
        return Exit.DONE
    async with AsyncRolloutClient(host, patience_s=config.stuck_after_s) as client:
        made = await evaluate_config(client, config, layout)
    completed = made["rollouts"] - made["masked"]
    summary = {
        "run_id": opened.manifest.run_id, "state": "completed" if completed else "failed",
        "rollouts": {
            "accepted": made["rollouts"], "completed": completed, "failed": made["masked"], "cancelled": 0, "open": 0,
        },
        "reward": {"mean": made["mean_reward"], "n": completed}, "timings": {"wall_s": time.monotonic() - began},
    }  # fmt: skip
    await asyncio.to_thread(write_summary, layout, summary)
    sys.stdout.write(table(made))
    sys.stdout.write(f"report    {layout.report / 'evaluation.json'}\nrows      {host / 'shards'}, tag {made['tag']}\n")
    return Exit.DONE if completed else Exit.FAILED


def _check_host(config: Config, host: Path) -> None:
    if manifest.read(RunLayout(host)) is None:
        raise ConfigError(f"evaluate.run_dir got {str(host)!r}: no run directory there", key="evaluate.run_dir")
    serving = load_config(host)
    if serving.task._target_ != config.task._target_:
        raise ConfigError(
            f"evaluate.run_dir: the run there rolls out {serving.task.name} ({serving.task._target_}), not "
            f"{config.task.name}; evaluate on a run that serves this task",
            key="evaluate.run_dir",
        )
