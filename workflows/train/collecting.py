"""Asks for an update's groups in waves and waits for them: every call may be repeated after a crash, by anyone.

A wave's tasks follow from where the data set was left and its idempotency key from its update, so that a trainer that
was killed asks for nothing twice: the run's router answers with the groups that it has accepted before.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from stages.client import AsyncRolloutClient
from workflows.errors import TrainError
from workflows.train.samples import Group, group_of

POLL_S: Final = 0.05
LEAST_RATE: Final = 0.1
"""Least share of groups with spread that is counted on: a wave is at most ten times what is missing."""


@dataclass(frozen=True)
class Wave:
    """Groups that are asked for together: `count` tasks from the `start`-th on."""

    update: int
    number: int
    start: int
    count: int


def task_at(task_ids: Sequence[str], seed: int, place: int) -> str:
    """The task at a place of an endless order: every pass over the data set is shuffled anew."""
    turn, at = divmod(place, len(task_ids))
    return task_ids[_order(len(task_ids), seed, turn)[at]]


@functools.lru_cache(maxsize=2)  # a wave lies in one pass, or across the end of one
def _order(count: int, seed: int, turn: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"tasks {seed} {turn}").shuffle(order)  # noqa: S311 (the order is to be repeatable)
    return tuple(order)


def wave_size(missing: int, rate: float) -> int:
    """Groups to ask for where `missing` are wanted and a share `rate` of them is expected to count."""
    return -int(-missing // max(rate, LEAST_RATE))


class Reader(Protocol):
    """Of a shard reader, `get` is all that is needed."""

    def get(self, rollout_id: str) -> Any:
        """The committed rollout, or None when it is not in the index yet."""
        ...


class Collector:
    """Submits waves and gives their groups once they are closed.

    Args:
        client: of the run.
        reader: of its shards.
        task_ids: the data set.
        key: what idempotency keys begin with: one trainer's, over all its lives.
        group_size: rollouts of a group.
        tag: of the rows.
        seed: of the order of tasks.
        after: results up to this seq are known not to be of any wave that is waited for.
        visibility_s: how long a published row may stay invisible here.
    """

    def __init__(
        self, client: AsyncRolloutClient, reader: Reader, task_ids: Sequence[str], *, key: str, group_size: int,
        tag: str, seed: int, after: int = 0, visibility_s: float = 60.0,
    ) -> None:  # fmt: skip
        self._client, self._reader, self._task_ids = client, reader, list(task_ids)
        self._key, self._group_size, self._tag, self._seed = key, group_size, tag, seed
        self.seq = after
        self._visibility_s = visibility_s
        self._closed: dict[str, list[str]] = {}

    async def submit(self, wave: Wave) -> list[str]:
        """Ask for a wave's groups, or learn which ones they are; returns their ids."""
        ids = [task_at(self._task_ids, self._seed, wave.start + n) for n in range(wave.count)]
        accepted = await self._client.submit(
            [{"task_id": task_id} for task_id in ids], idempotency_key=f"{self._key}-{wave.update}-{wave.number}",
            group_size=self._group_size, tag=self._tag,
        )  # fmt: skip
        return [group["group_id"] for group in accepted]

    async def closed(self, group_ids: Sequence[str]) -> list[Group]:
        """These groups, in this order, as soon as all are closed.

        Raises:
            RouterUnreachableError: no router answered for the client's patience.
            TrainError: a published row did not become readable.
        """
        while not self._closed.keys() >= set(group_ids):
            lines, self.seq = await self._client.results(self.seq, tag=self._tag)
            self._note(lines)
        found = [await self._read(group_id) for group_id in group_ids]
        for group_id in group_ids:
            self._closed.pop(group_id, None)
        return found

    def _note(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            self._closed[line["group_id"]] = list(line["rollout_ids"])

    async def _read(self, group_id: str) -> Group:
        return group_of(group_id, [await self._row(name) for name in self._closed[group_id]])

    async def _row(self, rollout_id: str) -> Any:
        """A row that the router has published; on a shared filesystem its index line may be seen here later."""
        deadline = time.monotonic() + self._visibility_s
        while (row := self._reader.get(rollout_id)) is None:
            if time.monotonic() > deadline:
                raise TrainError(
                    f"rollout {rollout_id} is published, and not in the index here after {self._visibility_s:.0f} s: "
                    "look at the shared filesystem, or raise fs.visibility_s"
                )
            await asyncio.sleep(POLL_S)
        return row
