"""collect: roll a whole data set out once, and return when every group has closed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from stages.client import AsyncRolloutClient
from stages.errors import ServiceError

BATCH: Final = 64
FULL_S: Final = 1.0


class Collected(msgspec.Struct, frozen=True):
    """What was asked for and has closed."""

    groups: int
    usable: int


async def collect(
    client: AsyncRolloutClient, task_ids: Sequence[str], *, group_size: int, tag: str, max_open: int
) -> Collected:
    """Submit every task and wait for its group.

    Safe to run again after any crash: batches carry idempotency keys, so what was accepted before is not accepted
    twice, and results are read from the start.

    Raises:
        ServiceError: the router refused a task.
        RouterUnreachableError: no router answered for the client's patience.
    """
    accepted: set[str] = set()
    async with asyncio.TaskGroup() as tasks:
        batch = max(1, min(BATCH, max_open // group_size))
        submitting = tasks.create_task(_submit_all(client, task_ids, batch, group_size, tag, accepted))
        waiting = tasks.create_task(_wait_for_all(client, submitting, accepted))
    return waiting.result()


async def _submit_all(
    client: AsyncRolloutClient, task_ids: Sequence[str], batch: int, group_size: int, tag: str, accepted: set[str]
) -> None:
    for number, start in enumerate(range(0, len(task_ids), batch)):
        tasks = [{"task_id": task_id} for task_id in task_ids[start : start + batch]]
        while True:
            try:
                groups = await client.submit(tasks, idempotency_key=f"collect-{number}", group_size=group_size, tag=tag)
            except ServiceError as error:
                if error.status != 429:
                    raise
                await asyncio.sleep(FULL_S)  # as many rollouts are open as the router admits
                continue
            break
        accepted.update(group["group_id"] for group in groups)


async def _wait_for_all(client: AsyncRolloutClient, submitting: asyncio.Task[None], accepted: set[str]) -> Collected:
    closed: dict[str, int] = {}
    after = 0
    while not submitting.done() or accepted - closed.keys():
        wait_s = 20.0 if submitting.done() else 1.0
        lines, after = await client.results(after, wait_s=wait_s)
        closed.update((line["group_id"], line["usable"]) for line in lines)
    return Collected(len(accepted), sum(closed[group_id] for group_id in accepted))
