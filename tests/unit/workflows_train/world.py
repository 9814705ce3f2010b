"""A run without processes: a router that answers at once, its rows, and a policy whose log-probs tell its version."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conf.training import Heldout, Train
from stages.errors import ServiceError
from workflows.train.learning import Prepared, Stats
from workflows.train.loop import Plan, Trainer
from workflows.train.samples import Sample

TASKS = [f"task-{number}" for number in range(10)]
HELDOUT = [f"heldout-{number}" for number in range(5)]
MINIBATCHES = 2


class Killed(Exception):
    """Stands for kill -9: raised in the middle of a call, and nothing is tidied up."""


class Clock:
    """Raises Killed at the `at`-th step that anything makes."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.now = at, 0

    def tick(self) -> None:
        self.now += 1
        if self.now == self.at:
            raise Killed


def logprob(version: int) -> float:
    return -0.1 * (version + 1)


class Router:
    """Answers for the client and for the reader. Half of a rollout's tokens are drawn when it is asked for, half later.

    Of ten tasks some are always solved and some never, the others by half of a group.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.version = 0
        self.keys: dict[str, tuple[str, list[dict[str, Any]]]] = {}
        self.accepted: dict[str, tuple[str, int, int, str]] = {}
        self.lines: list[dict[str, Any]] = []
        self.rows: dict[str, Any] = {}
        self.cancelled: list[str] = []
        self.pushed: list[int] = []
        self.loaded: list[int] = []
        self.polled: set[tuple[str | None, bool]] = set()
        """Tags of polls, and whether rows were wanted."""

    async def submit(
        self, tasks: Sequence[Any], *, idempotency_key: str, group_size: int = 1, tag: str = "", **more: Any
    ) -> list[dict[str, Any]]:
        self.clock.tick()
        body = json.dumps([list(tasks), group_size, tag], sort_keys=True)
        if idempotency_key in self.keys:
            before, groups = self.keys[idempotency_key]
            assert before == body, f"{idempotency_key} came with another body"
            return groups
        groups = []
        for task in tasks:
            group_id = f"g{len(self.accepted)}"
            self.accepted[group_id] = (task["task_id"], group_size, self.version, tag)
            groups.append({"group_id": group_id, "task_id": task["task_id"]})
        self.keys[idempotency_key] = (body, groups)
        self.clock.tick()  # killed before the answer arrived
        return groups

    async def results(
        self, after: int, *, tag: str | None = None, rows: bool = False, **_: Any
    ) -> tuple[list[dict[str, Any]], int]:
        self.clock.tick()
        self.polled.add((tag, rows))
        for group_id in [one for one in self.accepted if one not in self.cancelled]:
            if f"{group_id}-0" not in self.rows:
                self._close(group_id, *self.accepted[group_id])
        lines = [line for line in self.lines if line["seq"] > after and tag in (None, line["tag"])]
        return [line for line in lines if rows or line["type"] == "group"], len(self.lines)

    def _close(self, group_id: str, task_id: str, size: int, began: int, tag: str) -> None:
        ids = [f"{group_id}-{number}" for number in range(size)]
        kind = int(task_id.rpartition("-")[2]) % 5
        for number, rollout_id in enumerate(ids):
            masked = kind == 4 and number == 0
            reward = None if masked else {0: 0.0, 1: 1.0}.get(kind, float(number % 2))
            line = {
                "type": "rows", "group_id": group_id, "rollout_id": rollout_id, "tag": tag, "reward": reward,
                "mask_sample": masked, "task_id": task_id, "seq": len(self.lines) + 1,
            }  # fmt: skip
            chain = {
                "token_ids": [7, 8, 9, number], "loss_mask": [0, 1, 0, 1],
                "logprobs": [0.0, logprob(began), 0.0, logprob(self.version)],
                "policy_versions": [
                    {"version": began, "start": 1, "end": 2}, {"version": self.version, "start": 3, "end": 4},
                ],
            }  # fmt: skip
            self.rows[rollout_id] = SimpleNamespace(line=SimpleNamespace(**line), chains=(chain,))
            self.lines.append(line)
        self.lines.append({
            "type": "group", "group_id": group_id, "tag": tag, "rollout_ids": ids, "seq": len(self.lines) + 1,
            "closed_by": "complete", "usable": size,
        })  # fmt: skip

    def get(self, rollout_id: str) -> Any:
        return self.rows.get(rollout_id)

    async def policy(self, version: int | None = None, **body: Any) -> dict[str, Any]:
        self.clock.tick()
        if version is not None:
            if version <= self.version:
                raise ServiceError(409, "not_newer", "not above the current one")
            self.loaded.append(int((Path(body["weights_path"]) / "model.safetensors").read_text()))
            self.version = version
            self.pushed.append(version)
            self.clock.tick()
        return {"version": self.version}

    async def cancel(self, *, group_id: str) -> None:
        if f"{group_id}-0" in self.rows:
            raise ServiceError(409, "ended", "closed")
        self.cancelled.append(group_id)


class Policy:
    """Its weights are the number of its optimizer steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.steps = 0
        self.seen: list[Prepared] = []
        self.batches: list[list[str]] = []
        """Of each optimizer step, the rollout of each sample."""

    def snapshot(self) -> int:
        return self.steps

    def logprobs(self, samples: Sequence[Sample], weights: int | None = None) -> list[list[float]]:
        steps = self.steps if weights is None else weights
        assert steps % MINIBATCHES == 0, "between two steps of one update the policy has no version"
        return [[logprob(steps // MINIBATCHES)] * len(sample.places) for sample in samples]

    def first_logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        return self.logprobs(samples, 0)

    def update(self, batch: Sequence[Prepared], stats: Stats) -> None:
        self._clock.tick()
        self.steps += 1
        self.seen += batch
        self.batches.append([one.sample.rollout for one in batch])
        stats.tokens += sum(len(one.started) for one in batch)

    def policy_files(self) -> dict[str, bytes]:
        self._clock.tick()
        return {"model.safetensors": str(self.steps).encode()}

    def optimizer_bytes(self) -> bytes:
        self._clock.tick()
        return str(self.steps).encode()

    def restore(self, directory: Path, optimizer: bytes) -> None:
        assert (directory / "model.safetensors").read_bytes() == optimizer
        self.steps = int(optimizer)


class Words:
    """A tokenizer that has a token for every number."""

    @staticmethod
    def decode(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    @staticmethod
    def encode(text: str) -> list[int]:
        return [int(word) for word in text.split()]


def settings(**keys: Any) -> Train:
    return Train(**{"steps": 4, "groups": 3, "minibatches": MINIBATCHES, "heldout": Heldout(every=2, probe=2), **keys})


def trainer(
    run_dir: Path, router: Router, keys: Train, tasks: Sequence[str] = TASKS, *, heldout: Sequence[str] = HELDOUT,
    max_open: int = 1000, clock: Callable[[], float] = time.monotonic,
) -> tuple[Trainer, Policy]:  # fmt: skip
    policy = Policy(router.clock)
    (run_dir / "report").mkdir(parents=True, exist_ok=True)
    rows = [{"task_id": task_id, "data": {}} for task_id in heldout]
    plan = Plan(run_dir, "run", 4, 1, {"seed": 1}, max_open, 0.2)
    words: Any = Words()
    return Trainer(keys, plan, policy, words, tasks, rows, clock), policy


def lives(run_dir: Path, router: Router, keys: Train, kills: Callable[[int], int | None]) -> Any:
    """Train to the end, killed at the step of each life that `kills` names; returns the last life's state."""
    import asyncio

    for life in range(200):
        router.clock.at, router.clock.now = kills(life), 0
        work, _ = trainer(run_dir, router, keys)
        client: Any = router
        try:
            return asyncio.run(work.to_the_end(client, router))
        except Killed:
            continue
    raise AssertionError("it was killed 200 times")
