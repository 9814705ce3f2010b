"""Dynamic sampling against wait-for-all, on a real router with simulated rollouts of a long-tailed length.

Both sides have the same slots, tasks and lengths, and collect `TARGET` groups whose rewards differ for each of `STEPS`
training steps. Wait-for-all submits a batch, waits until every group of it has closed, and submits the next while
groups are missing; more than it needed count too. The other side is `client.stream`: groups without spread are replaced
at once, and what is under way at the target is carried over to the next step; then also with groups that are closed by
their first `MIN_USABLE` rollouts.

Lengths are log-normal (`MEDIAN_S`, `SIGMA`) with a share `TAIL` of Pareto-tailed ones (`ALPHA`), cut at `CUT_S`. A
rollout is right by a coin with its task's own bias, drawn from Beta(0.5, 0.5): many tasks are always or never solved.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from stages.client import AsyncRolloutClient, StreamGroup, has_spread
from stages.trajectory import RowRange
from stages.wire import CommitRow, LeaseOut
from stages.worker import Result
from tests.bench.report import emit
from tests.support.pools import ToyHand, working
from tests.support.routers import make_run, routed

SEED: Final = 7
SLOTS, GROUP, MIN_USABLE, TARGET, STEPS = 32, 8, 6, 8, 6
MEDIAN_S, SIGMA, TAIL, ALPHA, CUT_S = 0.1, 0.6, 0.05, 1.2, 4.0
AT_LEAST: Final = 1.5
TASKS: Final = 100
Side = Callable[[AsyncRolloutClient, int], AsyncIterator[list[StreamGroup]]]


def simulated(rollout_id: str, task_id: str) -> tuple[float, float]:
    """Seconds and reward of a rollout: the same on every side."""
    draw = random.Random(f"{SEED}:{rollout_id}")
    seconds = MEDIAN_S * draw.lognormvariate(0.0, SIGMA)
    if draw.random() < TAIL:
        seconds *= 4 * draw.paretovariate(ALPHA)
    bias = random.Random(f"{SEED}:{task_id}").betavariate(0.5, 0.5)
    return min(seconds, CUT_S), float(draw.random() < bias)


async def _run(lease: LeaseOut) -> Result:
    seconds, _ = simulated(lease.rollout_id, "")
    await asyncio.sleep(seconds)
    return Result(segment=RowRange("handoff/toy-1-x-0.seg", 0, 8, 1))


async def _grade(lease: LeaseOut) -> Result:
    number = int(lease.rollout_id.partition("-")[0][1:]) - 1
    _, reward = simulated(lease.rollout_id, f"toy-{number % TASKS}")
    return Result(row=CommitRow("shards/toy-1-x-0.arrows", 0, 8, 1, reward))


def _tasks() -> Any:
    """Task n belongs to group n, so that a group means the same on every side."""
    return ({"task_id": f"toy-{number % TASKS}"} for number in itertools.count())


async def wait_for_all(client: AsyncRolloutClient, steps: int) -> AsyncIterator[list[StreamGroup]]:
    """Batches of TARGET groups, each waited for as a whole, until a step has enough with spread."""
    tasks = _tasks()
    for _ in range(steps):
        kept: list[StreamGroup] = []
        while len(kept) < TARGET:
            batch = list(itertools.islice(tasks, TARGET))
            kept += [group async for group in client.stream(batch, GROUP, in_flight=TARGET) if has_spread(group)]
        yield kept


async def replenished(client: AsyncRolloutClient, steps: int) -> AsyncIterator[list[StreamGroup]]:
    """The stream with replacement and carrying over; groups are waited for to their last rollout."""
    tasks = _tasks()
    for _ in range(steps):
        yield [group async for group in client.stream(tasks, GROUP, target=TARGET)]


async def stopped_early(client: AsyncRolloutClient, steps: int) -> AsyncIterator[list[StreamGroup]]:
    """And a group is closed by its first MIN_USABLE rollouts."""
    tasks = _tasks()
    for _ in range(steps):
        yield [group async for group in client.stream(tasks, GROUP, target=TARGET, min_usable=MIN_USABLE)]


async def measure(side: Side, steps: int) -> list[tuple[float, int]]:
    """For each step: seconds since the start, usable rollouts so far."""
    curve: list[tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as scratch:
        layout = make_run(Path(scratch) / "run")
        async with (
            routed(layout),
            working(layout, "init"),
            working(layout, "run", ToyHand("run", _run), slots=SLOTS),
            working(layout, "eval", ToyHand("eval", _grade)),
            AsyncRolloutClient(layout.root) as client,
        ):
            began, usable = time.monotonic(), 0
            async for groups in side(client, steps):
                usable += sum(len(group.rewards) for group in groups)
                curve.append((time.monotonic() - began, usable))
    return curve


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two steps, to see that it works")
    given = parser.parse_args(arguments)
    steps = 2 if given.quick else STEPS
    results: dict[str, float] = {
        "seed": SEED, "slots": SLOTS, "group_size": GROUP, "min_usable": MIN_USABLE, "target": TARGET, "steps": steps,
        "median_s": MEDIAN_S, "sigma": SIGMA, "tail_share": TAIL, "tail_alpha": ALPHA, "cut_s": CUT_S,
    }  # fmt: skip
    sides: dict[str, Side] = {
        "wait_for_all": wait_for_all, "replenished": replenished, "stopped_early": stopped_early,
    }  # fmt: skip
    for name, side in sides.items():
        curve = asyncio.run(measure(side, steps))
        for step, (seconds, usable) in enumerate(curve, 1):
            results[f"{name}_step{step}_s"] = round(seconds, 2)
            results[f"{name}_step{step}_usable"] = usable
        results[f"{name}_usable_per_hour"] = round(curve[-1][1] / curve[-1][0] * 3600)
    base = results["wait_for_all_usable_per_hour"]
    ratios = {f"{name}_x_wait_for_all": results[f"{name}_usable_per_hour"] / base for name in list(sides)[1:]}
    best = ratios["stopped_early_x_wait_for_all"]
    errors = [] if best >= AT_LEAST or given.quick else [f"{best:.2f} times wait-for-all, {AT_LEAST} is the least"]
    return emit("replenish", results, ratios=ratios, errors=errors, as_json=given.json)


if __name__ == "__main__":
    raise SystemExit(main())
