"""Dynamic sampling over a scripted router: targets, dropped groups, what becomes of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stages.client import has_spread
from stages.client_stream import GroupStream, StreamGroup
from stages.errors import ServiceError, StageError

PLAIN: dict[str, Any] = {"target": None, "keep": None, "in_flight": 5, "leftover": "carry", "tag": "", "options": {}}
REWARDS = {"mixed": [0.0, 1.0], "slow": [0.0, 1.0], "solved": [1.0, 1.0], "failed": [0.0, 0.0]}


class Router:
    """Closes `at_a_time` groups a poll, oldest first, `slow` ones once not `stuck`; a task's id says how it ends."""

    def __init__(self, at_a_time: int = 2, most: int = 1000) -> None:
        self._at_a_time, self._most = at_a_time, most
        self.open: dict[str, str] = {}
        self.lines: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.begun: set[str] = set()
        self.stuck = True
        self.peak = self._number = 0

    async def submit(
        self, tasks: list[Any], *, idempotency_key: str | None = None, wait: bool = True, **options: Any
    ) -> list[dict[str, Any]]:
        assert not wait and idempotency_key and options["group_size"] == 2
        if len(self.open) + len(tasks) > self._most:
            raise ServiceError(429, "too_many_open", "full")
        groups = []
        for task in tasks:
            self._number += 1
            self.open[f"g{self._number}"] = task["task_id"]
            groups.append({"group_id": f"g{self._number}"})
        self.peak = max(self.peak, len(self.open))
        return groups

    def close(self, group_id: str) -> None:
        task_id = self.open.pop(group_id)
        ids = [f"{group_id}-0", f"{group_id}-1"]
        for rollout_id, reward in zip(ids, REWARDS[task_id.partition("-")[0]], strict=True):
            row = {"type": "rows", "rollout_id": rollout_id, "reward": reward, "mask_sample": False}
            self._publish({**row, "group_id": group_id})
        self._publish({"type": "group", "group_id": group_id, "closed_by": "complete", "usable": 2, "rollout_ids": ids})

    def _publish(self, line: dict[str, Any]) -> None:
        self.lines.append({**line, "tag": "", "seq": len(self.lines) + 1})

    async def results(self, after: int = 0, **options: Any) -> tuple[list[dict[str, Any]], int]:
        await asyncio.sleep(0)
        for group_id in [one for one, task in self.open.items() if not (self.stuck and task.startswith("slow"))][
            : self._at_a_time
        ]:
            self.close(group_id)
        return self.lines[after:], len(self.lines)

    async def group(self, group_id: str) -> dict[str, Any]:
        return {"state": "open" if group_id in self.open else "closed", "begun": group_id in self.begun}

    async def cancel(self, *, rollout_id: str | None = None, group_id: str | None = None) -> dict[str, Any]:
        assert group_id is not None
        if self.open.pop(group_id, None) is None:
            raise ServiceError(409, "ended", "closed already")
        self.cancelled.append(group_id)
        return {"cancelled": 2}

    async def status(self) -> dict[str, Any]:
        return {"seq": len(self.lines)}


def tasks(*names: str) -> list[dict[str, str]]:
    return [{"task_id": f"{name}-{i}"} for i, name in enumerate(names)]


async def taken(
    stream: GroupStream, source: Any, *, target: int | None = None, keep: Callable[[StreamGroup], bool] | None = None,
    in_flight: int | None = None, leftover: Any = "carry",
) -> list[str]:  # fmt: skip
    groups = stream.groups(
        source, 2, target=target, keep=keep, in_flight=in_flight, leftover=leftover, tag="", options={}
    )
    async with asyncio.timeout(10):
        return [group.task_id async for group in groups]


async def test_without_a_target_every_group_comes_once() -> None:
    router = Router()
    stream = GroupStream(router)
    source = tasks("mixed", "solved", "failed", "mixed", "solved")
    assert sorted(await taken(stream, source, in_flight=3)) == sorted(task["task_id"] for task in source)
    assert (router.peak, router.cancelled, stream.in_flight) == (3, [], 0)


async def test_with_a_target_groups_without_spread_are_dropped_and_replaced() -> None:
    router = Router()
    stream = GroupStream(router)
    found = await taken(stream, tasks(*["solved", "failed", "mixed"] * 10), target=3)
    assert [name.partition("-")[0] for name in found] == ["mixed"] * 3
    assert (stream.counts.given, stream.counts.dropped) == (3, 6)
    assert router.peak <= 6, "twice the target"


async def test_another_rule_may_say_which_groups_count() -> None:
    found = await taken(
        GroupStream(Router()), tasks(*["solved", "mixed"] * 5), target=2, keep=lambda g: min(g.rewards) == 1
    )
    assert [name.partition("-")[0] for name in found] == ["solved"] * 2


async def test_what_is_under_way_at_the_target_is_carried_over_and_the_rest_is_cancelled() -> None:
    router = Router(at_a_time=1)
    stream = GroupStream(router)
    source: Iterator[Any] = iter(tasks("mixed", "slow", "slow", "slow", "mixed"))
    router.begun = {"g2"}
    assert await taken(stream, source, target=1, in_flight=4) == ["mixed-0"]
    assert router.cancelled == ["g3", "g4"] and stream.in_flight == 1
    router.stuck = False
    rest = await taken(stream, source)
    assert rest[0] == "slow-1", "the trajectory that was under way comes first"
    assert rest[1:] == ["slow-2", "slow-3", "mixed-4"], "then the prompts that were given back"


async def test_prompts_that_nobody_began_come_first_in_the_next_stream_of_an_iterator() -> None:
    router = Router(at_a_time=1)
    stream = GroupStream(router)
    source: Iterator[Any] = iter(tasks("mixed", "mixed", "mixed", "mixed"))
    first = await taken(stream, source, target=1, in_flight=2)
    second = await taken(stream, source, in_flight=2)
    assert first == ["mixed-0"] and second == ["mixed-1", "mixed-2", "mixed-3"]


async def test_leftover_cancel_leaves_nothing_open() -> None:
    router = Router()
    stream = GroupStream(router)
    await taken(stream, tasks("mixed", *["slow"] * 5), target=1, in_flight=6, leftover="cancel")
    assert (router.open, stream.in_flight, len(router.cancelled)) == ({}, 0, 5)


async def test_a_stream_that_is_left_in_the_middle_gives_the_rest_to_the_next() -> None:
    router = Router(at_a_time=10)
    stream = GroupStream(router)
    groups = stream.groups(tasks(*["mixed"] * 5), 2, **PLAIN)
    assert (await anext(groups)).task_id == "mixed-0"
    await groups.aclose()  # type: ignore[attr-defined]
    assert await taken(stream, []) == ["mixed-1", "mixed-2", "mixed-3", "mixed-4"]


async def test_a_full_router_is_waited_for_without_losing_a_task() -> None:
    router = Router(most=2)
    found = await taken(GroupStream(router), tasks(*["mixed"] * 5), in_flight=2)
    assert len(found) == 5


async def test_what_fits_is_taken_where_others_keep_the_router_from_ever_holding_a_whole_batch() -> None:
    found = await taken(GroupStream(Router(most=2)), tasks(*["mixed"] * 5), in_flight=5)
    assert len(found) == 5


async def test_more_than_the_router_takes_at_once_is_asked_for_in_parts() -> None:
    class Small(Router):
        async def submit(self, tasks: list[Any], **options: Any) -> list[dict[str, Any]]:
            if len(tasks) > 1:
                raise ServiceError(413, "too_large", "send fewer tasks")
            return await super().submit(tasks, **options)

    assert len(await taken(GroupStream(Small()), tasks(*["mixed"] * 5), in_flight=5)) == 5


async def test_the_clients_end_cancels_what_it_owns_and_one_stream_goes_on_at_a_time() -> None:
    router = Router()
    stream = GroupStream(router)
    router.begun = {"g2"}
    await taken(stream, tasks("mixed", "slow"), target=1)
    assert stream.in_flight == 1
    first = stream.groups(tasks("mixed"), 2, **PLAIN)
    router.stuck = False
    await anext(first)
    with pytest.raises(StageError, match="one stream at a time"):
        await anext(stream.groups(tasks("mixed"), 2, **PLAIN))
    await first.aclose()  # type: ignore[attr-defined]
    await stream.close()
    assert router.open == {} and stream.in_flight == 0


def test_spread_is_among_those_that_count() -> None:
    rows = [{"reward": 1.0, "mask_sample": False}, {"reward": None, "mask_sample": True}]
    group = StreamGroup(group_id="g", task_id="t", tag="", closed_by="complete", usable=1, seq=1, rows=rows)
    assert not has_spread(group)
    rows.append({"reward": 0.0, "mask_sample": False})
    assert has_spread(group)
