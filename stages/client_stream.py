"""Dynamic sampling over the trainer's client: keep so many groups in flight, give those that count, end the rest.

A stream owns the groups that it has submitted and no others, at most `in_flight` at a time. Whatever ends it (its
target, the end of its tasks, a `break`) leaves none of them without an owner: what is under way is carried over to the
client's next stream, or cancelled; what nobody has begun is cancelled, and the client's end cancels all that is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, Protocol

import msgspec

from stages.errors import RouterUnreachableError, ServiceError, StageError

WAIT_S: Final = 20.0
FULL_S: Final = 1.0
"""Pause before tasks are offered again to a router that admits no more."""
IN_FLIGHT: Final = 64
BATCH: Final = 64
LEAVE_S: Final = 10.0
"""For ending what a stream leaves behind; a router that does not answer so long keeps it until its deadline."""
TOO_MANY: Final = "too_many_open"
TOO_LARGE: Final = "too_large"

Task = Mapping[str, Any]


class StreamGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One closed group: its index line, and the index line of each of its rollouts, in order."""

    group_id: str
    task_id: str
    tag: str
    closed_by: str
    usable: int
    seq: int
    rows: list[dict[str, Any]]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the rollouts that count; masked ones have none."""
        return [row["reward"] for row in self.rows if not row["mask_sample"] and row["reward"] is not None]


Keep = Callable[[StreamGroup], bool]


def has_spread(group: StreamGroup) -> bool:
    """Whether the group's rewards differ: where they do not, a group-relative advantage is zero everywhere.

    The filter of dynamic sampling in DAPO (arXiv 2503.14476, section 3.2); masked rollouts do not count.
    """
    return len(set(group.rewards)) > 1


class Counts(msgspec.Struct):
    """Groups over a client's life; in flight = submitted - given - dropped - cancelled."""

    submitted: int = 0
    given: int = 0
    dropped: int = 0
    cancelled: int = 0


class Calls(Protocol):
    """What a stream needs of a client."""

    async def submit(
        self, tasks: list[Task], *, idempotency_key: str | None = None, wait: bool = True, **options: Any
    ) -> list[dict[str, Any]]:
        """Accepted groups; without `wait` a full router's 429 is raised at once."""
        ...

    async def results(
        self, after: int = 0, *, tag: str | None = None, wait_s: float = 0, rows: bool = False
    ) -> tuple[list[dict[str, Any]], int]:
        """Published lines and where to go on."""
        ...

    async def group(self, group_id: str) -> dict[str, Any]:
        """One group's state."""
        ...

    async def cancel(self, *, rollout_id: str | None = None, group_id: str | None = None) -> dict[str, Any]:
        """End a group."""
        ...

    async def status(self) -> dict[str, Any]:
        """Counts and the newest seq."""
        ...


class _Owned:
    """A group in flight: its task, its tag and the rollouts that have ended so far."""

    __slots__ = ("begun", "rows", "tag", "task")

    def __init__(self, task: Task, tag: str) -> None:
        self.task, self.tag = task, tag
        self.rows: dict[str, dict[str, Any]] = {}
        self.begun = False


class GroupStream:
    """A client's streams, one after the other; holds what the last one has carried over."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._owned: dict[str, _Owned] = {}
        self._again: deque[Task] = deque()
        self._after = -1
        self._busy = False
        self.counts = Counts()

    @property
    def in_flight(self) -> int:
        """Groups that are owned now."""
        return len(self._owned)

    async def groups(
        self, tasks: Iterable[Task], group_size: int, *, target: int | None, keep: Keep | None, in_flight: int | None,
        leftover: Literal["carry", "cancel"], tag: str, options: Mapping[str, Any],
    ) -> AsyncIterator[StreamGroup]:  # fmt: skip
        """See AsyncRolloutClient.stream."""
        if self._busy:
            raise StageError("this client is streaming already: one stream at a time, or a client for each")
        if target is not None and target < 1:
            raise ValueError(f"target {target}: give 1 or more groups, or None for all")
        self._busy = True
        keep = keep or (has_spread if target is not None else None)
        room = max(1, in_flight or (2 * target if target is not None else IN_FLIGHT))
        source = _Source(tasks, self._again)
        given = 0
        try:
            if self._after < 0:
                self._after = int((await self._calls.status())["seq"])
            while True:
                full = await self._submit(source, room, group_size, tag, options)
                if not self._owned and source.empty:
                    return
                async for group in self._closed(tag, FULL_S if full else WAIT_S):
                    if keep is not None and not keep(group):
                        self.counts.dropped += 1
                        continue
                    self.counts.given += 1
                    given += 1
                    yield group
                    if given == target:
                        return
        finally:
            self._busy = False
            with contextlib.suppress(TimeoutError):
                await asyncio.shield(asyncio.wait_for(self._leave(source, leftover), LEAVE_S))

    async def _submit(self, source: _Source, room: int, group_size: int, tag: str, options: Mapping[str, Any]) -> bool:
        """Fill up to `room` groups in flight; says whether the router had no place for more.

        A batch that it does not take is halved: others may keep it from ever having room for all of one.
        """
        most = BATCH
        while (free := room - len(self._owned)) > 0 and (batch := source.take(min(free, most))):
            key = f"stream-{secrets.token_hex(16)}"
            try:
                accepted = await self._calls.submit(
                    batch, idempotency_key=key, wait=False, group_size=group_size, tag=tag, **options
                )
            except ServiceError as error:
                source.give_back(batch)
                if len(batch) > 1 and error.code in (TOO_MANY, TOO_LARGE):
                    most = len(batch) // 2
                    continue
                if error.code != TOO_MANY:
                    raise
                if not self._owned:
                    await asyncio.sleep(FULL_S)  # others fill the router: there is nothing of ours to wait for
                return True
            except BaseException:  # whatever kept them from being taken, the tasks are asked for again; raised again
                source.give_back(batch)
                raise
            for task, group in zip(batch, accepted, strict=True):
                self._owned[group["group_id"]] = _Owned(task, tag)
            self.counts.submitted += len(accepted)
        return False

    async def _closed(self, tag: str, wait_s: float) -> AsyncIterator[StreamGroup]:
        """Owned groups that have closed since; each is let go of before it is given."""
        if not self._owned:
            return
        one_tag = all(owned.tag == tag for owned in self._owned.values())
        lines, upto = await self._calls.results(self._after, tag=tag if one_tag else None, wait_s=wait_s, rows=True)
        for line in lines:
            owned = self._owned.get(line["group_id"])
            if owned is not None and line["type"] == "rows":
                owned.rows[line["rollout_id"]] = line
            elif owned is not None:
                del self._owned[line["group_id"]]
            # Behind the line before it is given: a stream that is left here goes on after it.
            self._after = max(self._after, line["seq"])
            if owned is not None and line["type"] == "group":
                yield StreamGroup(
                    group_id=line["group_id"], task_id=str(owned.task["task_id"]), tag=line["tag"],
                    closed_by=line["closed_by"], usable=line["usable"], seq=line["seq"],
                    rows=[owned.rows[one] for one in line["rollout_ids"] if one in owned.rows],
                )  # fmt: skip
        self._after = max(self._after, upto)

    async def _leave(self, source: _Source, leftover: str) -> None:
        """End what is not carried over. Tasks that nobody has begun come first in the next stream of one iterator."""
        for group_id, owned in list(self._owned.items()):
            if leftover == "carry" and (owned.begun or owned.rows or await self._has_begun(group_id)):
                owned.begun = True
                continue
            if await self._cancel(group_id) and leftover == "carry" and source.is_iterator:
                self._again.append(owned.task)

    async def _has_begun(self, group_id: str) -> bool:
        try:
            group = await self._calls.group(group_id)
        except (ServiceError, RouterUnreachableError):
            return True  # closed meanwhile, or not to be asked now: its results come later
        return group["state"] == "closed" or bool(group.get("begun", True))

    async def _cancel(self, group_id: str) -> bool:
        """Whether it was open until now; what cannot be asked for stays owned."""
        try:
            await self._calls.cancel(group_id=group_id)
        except RouterUnreachableError:
            return False
        except ServiceError as error:
            if error.status not in {404, 409}:
                return False
            del self._owned[group_id]
            self.counts.cancelled += 1
            return False
        del self._owned[group_id]
        self.counts.cancelled += 1
        return True

    async def close(self) -> None:
        """Cancel everything that is owned still."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                for group_id in list(self._owned):
                    await self._cancel(group_id)


class _Source:
    """The tasks of a stream: those that an earlier one has given back first."""

    def __init__(self, tasks: Iterable[Task], again: deque[Task]) -> None:
        self._tasks: Iterator[Task] = iter(tasks)
        self.is_iterator = self._tasks is tasks
        self._again = again
        self._dry = False

    @property
    def empty(self) -> bool:
        """Whether nothing more comes."""
        return self._dry and not self._again

    def take(self, count: int) -> list[Task]:
        """Up to so many."""
        batch: list[Task] = []
        while len(batch) < count:
            if self._again:
                batch.append(self._again.popleft())
                continue
            try:
                batch.append(next(self._tasks))
            except StopIteration:
                self._dry = True
                break
        return batch

    def give_back(self, batch: list[Task]) -> None:
        """These come first again."""
        self._again.extendleft(reversed(batch))
