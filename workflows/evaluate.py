"""evaluate: k rollouts of every task, graded into pass@1 to pass@k with confidence intervals and a table a task.

pass@k is the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1): with n rollouts of a task of which c
are right, 1 - C(n-c, k) / C(n, k), averaged over tasks. The interval is Wilson's score interval (JASA 22, 1927) over
tasks: a task's estimate lies in [0, 1], so its variance is at most that of a coin with the same mean, and the interval
is at least as wide as it must be, also where all tasks agree. Tasks are the sample, not rollouts: those of one task are
not independent (Miller 2024, arXiv 2411.00640).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from stages.client import AsyncRolloutClient
from stages.errors import ServiceError

Z95: Final = 1.959963984540054
RIGHT: Final = 1.0
"""The least reward that counts as solved."""
BATCH: Final = 64
PARTS: Final = 16
"""A batch is this part of what the router holds at most: beside a training run all of it is never free."""
FULL_S: Final = 1.0


class TaskScore(msgspec.Struct, frozen=True):
    """One task: rollouts that count, those that are right, those that the infrastructure lost."""

    task_id: str
    n: int
    correct: int
    masked: int
    mean_reward: float | None
    rewards: list[float | None]
    rollout_ids: list[str]


class Interval(msgspec.Struct, frozen=True):
    """An estimate with its 95 % interval over `tasks` tasks."""

    value: float
    low: float
    high: float
    tasks: int


def pass_at(n: int, correct: int, k: int) -> float:
    """The chance that at least one of k rollouts, drawn without putting back from n, is right."""
    if n - correct < k:
        return 1.0
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def wilson(mean: float, n: int, z: float = Z95) -> tuple[float, float]:
    """The score interval of a mean of n values in [0, 1]."""
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(max(0.0, mean * (1 - mean)) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def estimate(scores: Sequence[TaskScore], k: int) -> Interval | None:
    """pass@k over the tasks that have k rollouts that count; None where none has."""
    values = [pass_at(score.n, score.correct, k) for score in scores if score.n >= k]
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    return Interval(mean, *wilson(mean, len(values)), len(values))


def steps(k: int) -> list[int]:
    """The k that are reported: powers of two up to k, and k itself."""
    return sorted({2**i for i in range(k.bit_length()) if 2**i <= k} | {k})


def score(task_id: str, rows: Sequence[Mapping[str, Any]]) -> TaskScore:
    """A task's score from the index lines of its rollouts."""
    ordered = sorted(rows, key=lambda row: int(str(row["rollout_id"]).rpartition("-")[2]))
    rewards = [None if row["mask_sample"] else row["reward"] for row in ordered]
    counted = [reward for reward in rewards if reward is not None]
    return TaskScore(
        task_id, len(counted), sum(reward >= RIGHT for reward in counted), len(rewards) - len(counted),
        math.fsum(counted) / len(counted) if counted else None, rewards, [row["rollout_id"] for row in ordered],
    )  # fmt: skip


def report(scores: Sequence[TaskScore], k: int, **about: Any) -> dict[str, Any]:
    """report/evaluation.json: the estimates, then each task.

    `about` is what else is known: the run, its tag, the policy versions.
    """
    counted = [reward for one in scores for reward in one.rewards if reward is not None]
    passes = {str(step): estimate(scores, step) for step in steps(k)}
    return {
        "v": 1, **about, "k": k, "tasks": len(scores), "rollouts": sum(len(one.rewards) for one in scores),
        "masked": sum(one.masked for one in scores),
        "tasks_without_result": sum(one.n == 0 for one in scores),
        "mean_reward": math.fsum(counted) / len(counted) if counted else None,
        "pass_at_1": msgspec.to_builtins(passes["1"]),
        "pass_at_k": {step: msgspec.to_builtins(found) for step, found in passes.items()},
        "per_task": [
            {**msgspec.to_builtins(one), "pass_at_1": pass_at(one.n, one.correct, 1) if one.n else None}
            for one in scores
        ],
    }  # fmt: skip


async def evaluate(
    client: AsyncRolloutClient, tasks: Sequence[Mapping[str, Any]], *, k: int, tag: str, priority: int,
    sampling: Mapping[str, Any], key: str, max_open: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Roll every task out k times; returns the index lines of the rollouts, in the order of the tasks.

    Safe to run again after any crash with the same `key`: what was accepted before is not accepted twice, and results
    are read from the start.

    Raises:
        ServiceError: the router refused a task.
        RouterUnreachableError: no router answered for the client's patience.
    """
    batch = max(1, min(BATCH, max_open // (PARTS * k)))
    order: list[str] = []
    rows: dict[str, list[dict[str, Any]]] = {}
    closed: set[str] = set()
    after, start = 0, 0
    while start < len(tasks) or len(closed) < len(order):
        wait_s = 20.0
        if start < len(tasks):
            try:
                groups = await client.submit(
                    tasks[start : start + batch], idempotency_key=f"{key}-{start}", wait=False, group_size=k, tag=tag,
                    priority=priority, sampling=dict(sampling),
                )  # fmt: skip
            except ServiceError as error:
                if error.status != 429:
                    raise
                if not order:
                    await asyncio.sleep(FULL_S)
                wait_s = FULL_S
            else:
                start += batch
                order += [group["group_id"] for group in groups]
                if start < len(tasks):
                    continue
                after = 0  # groups that closed before their submission was repeated lie behind us
        lines, after = await client.results(after, tag=tag, wait_s=wait_s, rows=True)
        for line in lines:
            if line["type"] == "group":
                closed |= {line["group_id"]} & set(order)
            else:
                kept = rows.setdefault(line["group_id"], [])
                if line["seq"] not in {row["seq"] for row in kept}:
                    kept.append(line)
    return [row for group_id in order for row in rows[group_id]]
