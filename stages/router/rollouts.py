"""Trainer calls: submit, look up, cancel, results and trajectories."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from stages.errors import ServiceError
from stages.ledger.events import Cancelled, GroupSpec, Submitted
from stages.ledger.state import Group, Rollout
from stages.protocols import Row
from stages.router.core import Router
from stages.router.places import group_name
from stages.router.served import ServedTask
from stages.trajectory import Sampling
from stages.wire import GroupOut, RolloutsIn, RolloutsOut

PAGE: Final = 1000
RESULTS_LIMIT: Final = 10_000
PUBLISHED_S: Final = 5.0
"""What has ended is out within milliseconds, unless the filesystem stalls."""


class _Kind(msgspec.Struct, frozen=True):
    type: str
    tag: str


_kind = msgspec.json.Decoder(_Kind)


def _is_wanted(line: _Kind, tag: str | None, rows: bool) -> bool:
    return (rows or line.type == "group") and tag in {None, line.tag}


class Rollouts:
    """Answers trainers on behalf of the router."""

    def __init__(self, router: Router, served: ServedTask, sampling: Sampling, max_open: int) -> None:
        self._router, self._served, self._sampling, self._max_open = router, served, sampling, max_open
        self.check_callback: Callable[[str | None], None] = lambda url: None

    async def submit(self, request: RolloutsIn, key: str | None, body: bytes) -> RolloutsOut:
        """Accept tasks; the answer comes when they are durable. With a key, the same body is accepted once."""
        digest = hashlib.sha256(body).hexdigest()[:32] if key is not None else None
        if key is not None and key in self._router.ledger.state.keys:
            return await self._accepted_before(key, digest)
        self._router.check_open()
        self._check(request)
        rows, environments = await asyncio.to_thread(self._prepared, request)
        if key is not None and key in self._router.ledger.state.keys:
            return await self._accepted_before(key, digest)
        self._check(request)  # again: others may have been accepted meanwhile, or a drain have begun
        first = self._router.ledger.state.next_group
        groups = [
            GroupSpec(group_name(first + i), str(row["task_id"]), self._router.payloads.stage(row), environment)
            for i, (row, environment) in enumerate(zip(rows, environments, strict=True))
        ]
        sampling = request.sampling.over(self._sampling) if request.sampling is not None else None
        event = Submitted(
            t=self._router.clock(), groups=groups, n=request.group_size, tag=request.tag, priority=request.priority,
            sampling=sampling, deadline_s=request.deadline_s, min_usable=request.min_usable,
            max_lag=request.policy.max_lag if request.policy else None, callback_url=request.callback_url, key=key,
            body_digest=digest,
        )  # fmt: skip
        accepted = await self._router.submit(event)
        return RolloutsOut([GroupOut(*group) for group in accepted])

    def _prepared(self, request: RolloutsIn) -> tuple[list[Row], list[str]]:
        """Rows and environment keys of the tasks; in a thread, since served data may have to be read first."""
        rows = [self._served.row(task.task_id, task.data, f"tasks[{i}]") for i, task in enumerate(request.tasks)]
        return rows, [self._served.checked_environment(row, f"tasks[{i}]") for i, row in enumerate(rows)]

    async def _accepted_before(self, key: str, digest: str | None) -> RolloutsOut:
        body_digest, group_ids = self._router.ledger.state.keys[key]
        if body_digest != digest:
            raise ServiceError(409, "idempotency_conflict", f"Idempotency-Key {key!r} came before with another body")
        await self._router.settled()
        return RolloutsOut([await self._group_out(group_id) for group_id in group_ids])

    async def _group_out(self, group_id: str) -> GroupOut:
        group = self._router.ledger.state.groups.get(group_id)
        if group is not None:
            return GroupOut(group.id, group.task_id, group.rollouts)
        line = await self._published(group_id, self._router.publisher.seq_of_group)
        first = await self._published(line["rollout_ids"][0], self._router.publisher.seq_of_rollout)
        return GroupOut(group_id, first["task_id"], line["rollout_ids"])

    async def _published(self, name: str, seq_of: Callable[[str], int | None]) -> dict[str, Any]:
        """The line of an id that is open no more; what has ended just now is waited for until it is out."""
        publisher = self._router.publisher
        if seq_of(name) is None:
            await publisher.completed(self._router.ledger.state.seq, PUBLISHED_S)
        seq = seq_of(name)
        if seq is None:
            raise ServiceError(404, "not_found", f"{name!r} is not known to this run")
        return await publisher.line(seq)

    def _check(self, request: RolloutsIn) -> None:
        if request.min_usable is not None and request.min_usable > request.group_size:
            message = f"min_usable: {request.min_usable} is more than group_size {request.group_size}"
            raise ServiceError(400, "invalid", message)
        self.check_callback(request.callback_url)
        state = self._router.ledger.state
        wanted, open_now = len(request.tasks) * request.group_size, len(state.rollouts)
        if state.draining:
            raise ServiceError(503, "draining", "the run is draining and accepts nothing more", retry_after_s=30)
        if wanted > self._max_open:
            message = f"tasks: {wanted} rollouts at once, admission.max_open is {self._max_open}: send fewer tasks"
            raise ServiceError(413, "too_large", message)
        if open_now + wanted > self._max_open:
            message = f"{open_now} rollouts are open, {wanted} more would pass admission.max_open={self._max_open}"
            raise ServiceError(429, "too_many_open", message, retry_after_s=1)

    async def rollout(self, rollout_id: str) -> dict[str, Any]:
        """One rollout's state, open or ended."""
        rollout = self._router.ledger.state.rollouts.get(rollout_id)
        if rollout is not None:
            return _open_view(rollout)
        return _ended_view(await self._published(rollout_id, self._router.publisher.seq_of_rollout))

    async def group(self, group_id: str) -> dict[str, Any]:
        """One group's state, open or closed."""
        group = self._router.ledger.state.groups.get(group_id)
        if group is not None:
            return _group_view(group, self._router.ledger.state.rollouts)
        line = await self._published(group_id, self._router.publisher.seq_of_group)
        return {"state": "closed", "open": 0, **line}

    async def listing(self, state: str | None, tag: str | None, after: str | None) -> dict[str, Any]:
        """A page of rollouts: open ones by acceptance, then ended ones by seq; `next` goes on from there."""
        kind, _, position = (after or "open:0").partition(":")
        if kind not in {"open", "ended"} or not re.fullmatch(r"[0-9]{1,18}", position):
            raise ServiceError(400, "invalid", f"after: {after!r} is not a `next` of this listing")
        found: list[dict[str, Any]] = []
        last_order = int(position)
        if kind == "open" and state in {None, "queued", "leased"}:
            for rollout in self._router.ledger.state.rollouts.values():
                group = self._router.ledger.state.groups[rollout.group]
                wanted = (tag is None or group.tag == tag) and state in {None, rollout.state}
                if rollout.order > int(position) and wanted:
                    if len(found) == PAGE:
                        return {"rollouts": found, "next": f"open:{last_order}"}
                    found.append(_open_view(rollout))
                    last_order = rollout.order
            position = "0"
        seq = int(position)
        while texts := await self._router.publisher.texts(seq, PAGE):
            for text in texts:
                line = msgspec.json.decode(text)
                if line["type"] == "rows" and tag in {None, line["tag"]} and state in {None, line["status"]}:
                    if len(found) >= PAGE:
                        return {"rollouts": found, "next": f"ended:{seq}"}
                    found.append(_ended_view(line))
                seq += 1
        return {"rollouts": found, "next": None}

    async def cancel(self, *, rollout_id: str | None = None, group_id: str | None = None) -> dict[str, Any]:
        """End an open rollout or group; workers that hold it are told at their next heartbeat."""
        state = self._router.ledger.state
        if rollout_id is not None and rollout_id not in state.rollouts:
            await self.rollout(rollout_id)
            raise ServiceError(409, "ended", f"rollout {rollout_id!r} has ended already")
        if group_id is not None and group_id not in state.groups:
            await self.group(group_id)
            raise ServiceError(409, "ended", f"group {group_id!r} has closed already")
        event = Cancelled(
            t=self._router.clock(),
            rollouts=[rollout_id] if rollout_id is not None else [],
            groups=[group_id] if group_id is not None else [],
        )
        return {"cancelled": await self._router.submit(event)}

    async def results(
        self, after: int, tag: str | None, wait_s: float, limit: int, rows: bool
    ) -> tuple[list[bytes], int]:
        """Published lines after a seq, and the seq to go on from; waits up to `wait_s` for the first that fits."""
        publisher = self._router.publisher
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        limit = min(limit, RESULTS_LIMIT)
        while True:
            found: list[bytes] = []
            while len(found) < limit and (texts := await publisher.texts(after, limit - len(found))):
                after += len(texts)
                found += [text for text in texts if _is_wanted(_kind.decode(text), tag, rows)]
            left_s = until - loop.time()
            if found or left_s <= 0 or self._router.stopping or not await publisher.wait_for_more(after, left_s):
                return found, after

    async def trajectory(self, rollout_id: str) -> dict[str, Any]:
        """The committed row of a rollout as JSON."""
        view = await self.rollout(rollout_id)
        if view["row"] is None:
            raise ServiceError(404, "no_row", f"rollout {rollout_id!r} has no row: it is {view['state']}")
        published = await self._published(rollout_id, self._router.publisher.seq_of_rollout)
        from stages.shards.reader import read_row_json  # brings pyarrow along, for which no router's start waits

        return await asyncio.to_thread(read_row_json, self._router.layout.root, published)


def _open_view(rollout: Rollout) -> dict[str, Any]:
    return {
        "rollout_id": rollout.id, "group_id": rollout.group, "state": rollout.state, "stage": rollout.stage,
        "attempt": rollout.attempt, "failure": {"message": rollout.message} if rollout.message else None, "row": None,
        "timing": {
            "queue_init_s": rollout.queue_init_s, "init_s": rollout.init_s, "queue_run_s": rollout.queue_run_s,
            "run_s": rollout.run_s, "llm_s": rollout.llm_s, "tool_s": rollout.tool_s,
            "queue_eval_s": rollout.queue_eval_s,
        },
    }  # fmt: skip


def _ended_view(line: dict[str, Any]) -> dict[str, Any]:
    row = {name: line[name] for name in ("shard", "offset", "length")} if line["shard"] is not None else None
    failure = {"class": line["failure_class"]} if line["failure_class"] is not None else None
    return {
        "rollout_id": line["rollout_id"], "group_id": line["group_id"], "state": line["status"], "stage": None,
        "attempt": None, "timing": None, "failure": failure, "row": row, "reward": line["reward"], "seq": line["seq"],
    }  # fmt: skip


def _group_view(group: Group, rollouts: Mapping[str, Rollout]) -> dict[str, Any]:
    """`begun`: an attempt of any of its rollouts is under way or over."""
    still_open = [rollouts[rollout_id] for rollout_id in group.rollouts if rollout_id in rollouts]
    return {
        "group_id": group.id, "task_id": group.task_id, "tag": group.tag, "state": "open", "open": group.open,
        "usable": group.usable, "rollout_ids": group.rollouts,
        "begun": len(still_open) < len(group.rollouts) or any(rollout.attempt for rollout in still_open),
    }  # fmt: skip


def encode_lines(lines: list[bytes]) -> bytes:
    """NDJSON."""
    return b"".join(line + b"\n" for line in lines)
