"""The trainer's client: submit tasks, read results as they are published, cancel, set the policy version."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlencode

import msgspec

from stages.client_stream import TOO_MANY, Counts, GroupStream, Keep, StreamGroup, has_spread
from stages.http import FINAL_CODES, RouterLink

__all__ = ["AsyncRolloutClient", "Keep", "RolloutClient", "StreamGroup", "has_spread"]

WAIT_S: Final = 20.0

T = TypeVar("T")


class AsyncRolloutClient:
    """Talks to the run in a directory, or to a router by URL and token; use as an async context manager.

    A router that dies and comes back is found again; what a call needs to be repeated safely (an idempotency key, the
    seq to go on from) it carries itself.
    """

    def __init__(
        self, run_dir: Path | str | None = None, token: str | None = None, *, url: str | None = None,
        patience_s: float = 120.0,
    ) -> None:  # fmt: skip
        if url is None and isinstance(run_dir, str) and run_dir.startswith(("http://", "https://")):
            run_dir, url = None, run_dir
        directory = Path(run_dir) if run_dir is not None else None
        self._link = RouterLink(
            "trainer", run_dir=directory, url=url.rstrip("/") if url else None, token=token, patience_s=patience_s
        )
        self._stream = GroupStream(self)

    async def __aenter__(self) -> AsyncRolloutClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stream.close()
        await self._link.__aexit__(None, None, None)

    async def submit(
        self, tasks: Sequence[Mapping[str, Any]], *, idempotency_key: str | None = None, wait: bool = True,
        **options: Any,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Ask for rollouts; returns the accepted groups.

        Args:
            tasks: `{"task_id", "data"?}` each.
            idempotency_key: the same key and body is accepted once, however often it is sent, also by another client.
                Without one this call makes its own, so that a lost answer doubles nothing.
            wait: whether to offer the tasks again, for as long as the client's patience, to a router that is full.
            options: further fields of POST /v1/rollouts: group_size, tag, sampling, priority, deadline_s, ...

        Raises:
            ServiceError: refused; the message names the field.
            RouterUnreachableError: no router answered.
        """
        headers = {"Idempotency-Key": idempotency_key or f"auto-{secrets.token_hex(16)}"}
        body = {"tasks": list(tasks), **options}
        final = FINAL_CODES if wait else FINAL_CODES | {TOO_MANY}
        answer = await self._link.call(
            "POST", "/v1/rollouts", body, answer=dict[str, Any], headers=headers, final=final
        )
        groups: list[dict[str, Any]] = answer["groups"]
        return groups

    async def results(
        self, after: int = 0, *, tag: str | None = None, wait_s: float = WAIT_S, limit: int = 1000, rows: bool = False
    ) -> tuple[list[dict[str, Any]], int]:
        """One long poll: published lines after a seq, and the seq to go on from."""
        query = {"after": after, "wait_s": wait_s, "limit": limit, "rows": int(rows)}
        if tag is not None:
            query["tag"] = tag  # type: ignore[assignment]
        response = await self._link.request("GET", f"/v1/results?{urlencode(query)}", timeout_s=wait_s + 30)
        lines = [msgspec.json.decode(line) for line in response.content.splitlines()]
        return lines, int(response.headers["X-Next-After"])

    def stream(
        self, tasks: Iterable[Mapping[str, Any]], group_size: int = 1, *, target: int | None = None,
        keep: Keep | None = None, in_flight: int | None = None, leftover: Literal["carry", "cancel"] = "carry",
        tag: str = "", **options: Any,
    ) -> AsyncGenerator[StreamGroup, None]:  # fmt: skip
        """Groups as they close, each once, whatever happens to the router meanwhile.

        Args:
            tasks: `{"task_id", "data"?}` each; may be endless. Taken as there is room.
            group_size: rollouts a task.
            target: end after so many groups that are kept; None: after the last task's.
            keep: whether a group counts; others are dropped and more tasks are taken. None keeps all, but with a
                target those whose rewards differ (`has_spread`).
            in_flight: groups that are open at once at most; None: twice the target, or 64.
            leftover: what becomes of groups that are open at the end. carry: those under way go on, and the next
                stream gives them first; those that nobody has begun are cancelled, and their tasks come first in the
                next stream where `tasks` is an iterator. cancel: all are cancelled. The client's end cancels the rest.
            tag: label of the rows.
            options: further fields of POST /v1/rollouts: sampling, priority, deadline_s, min_usable, policy, ...

        Raises:
            ServiceError: the router refused a task.
            RouterUnreachableError: no router answered for the client's patience.
            StageError: another stream of this client is going on.
        """
        groups: AsyncGenerator[StreamGroup, None] = self._stream.groups(  # type: ignore[assignment]
            tasks, group_size, target=target, keep=keep, in_flight=in_flight, leftover=leftover, tag=tag,
            options=options,
        )  # fmt: skip
        return groups

    @property
    def counts(self) -> Counts:
        """Groups of this client's streams: submitted, given, dropped, cancelled."""
        return self._stream.counts

    async def follow(
        self, after: int = 0, *, tag: str | None = None, rows: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """Published lines for ever, in seq order, each once."""
        while True:
            lines, after = await self.results(after, tag=tag, rows=rows)
            for line in lines:
                yield line

    async def rollout(self, rollout_id: str) -> dict[str, Any]:
        """One rollout's state."""
        return await self._link.call("GET", f"/v1/rollouts/{rollout_id}", answer=dict[str, Any])

    async def group(self, group_id: str) -> dict[str, Any]:
        """One group's state."""
        return await self._link.call("GET", f"/v1/groups/{group_id}", answer=dict[str, Any])

    async def trajectory(self, rollout_id: str) -> dict[str, Any]:
        """A committed row."""
        return await self._link.call("GET", f"/v1/trajectories/{rollout_id}", answer=dict[str, Any])

    async def cancel(self, *, rollout_id: str | None = None, group_id: str | None = None) -> dict[str, Any]:
        """End an open rollout or group."""
        path = f"/v1/rollouts/{rollout_id}" if rollout_id is not None else f"/v1/groups/{group_id}"
        return await self._link.call("DELETE", path, answer=dict[str, Any])

    async def policy(self, version: int | None = None, **options: Any) -> dict[str, Any]:
        """The fleet's policy version; with `version`, set it."""
        if version is None:
            return await self._link.call("GET", "/v1/policy", answer=dict[str, Any])
        return await self._link.call("POST", "/v1/policy", {"version": version, **options}, answer=dict[str, Any])

    async def status(self, *, patience_s: float | None = None) -> dict[str, Any]:
        """Counts, stages, fleet."""
        return await self._link.call("GET", "/v1/status", answer=dict[str, Any], timeout_s=10, patience_s=patience_s)

    async def add_replica(self, url: str, *, model: str = "", capacity: int = 64) -> dict[str, Any]:
        """Add an engine that serves already."""
        body = {"url": url, "model": model, "capacity": capacity}
        return await self._link.call("POST", "/v1/replicas", body, answer=dict[str, Any])

    async def drain(self) -> None:
        """Ask the run to hand out no more work."""
        await self._link.call("POST", "/v1/drain", answer=bytes)


async def _next(groups: AsyncIterator[StreamGroup]) -> StreamGroup | None:
    return await anext(groups, None)


class RolloutClient:
    """AsyncRolloutClient for programs without an event loop: the same calls, blocking; a context manager."""

    def __init__(
        self, run_dir: Path | str | None = None, token: str | None = None, *, url: str | None = None,
        patience_s: float = 120.0,
    ) -> None:  # fmt: skip
        self._runner = asyncio.Runner()
        self._client = AsyncRolloutClient(run_dir, token, url=url, patience_s=patience_s)

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close connections and loop."""
        self._run(self._client.__aexit__())
        self._runner.close()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(call)

    def submit(
        self, tasks: Sequence[Mapping[str, Any]], *, idempotency_key: str | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """See AsyncRolloutClient.submit."""
        return self._run(self._client.submit(tasks, idempotency_key=idempotency_key, **options))

    def results(self, after: int = 0, **options: Any) -> tuple[list[dict[str, Any]], int]:
        """See AsyncRolloutClient.results."""
        return self._run(self._client.results(after, **options))

    def stream(
        self, tasks: Iterable[Mapping[str, Any]], group_size: int = 1, **options: Any
    ) -> Generator[StreamGroup, None, None]:
        """See AsyncRolloutClient.stream."""
        groups = self._client.stream(tasks, group_size, **options)
        try:
            while (group := self._run(_next(groups))) is not None:
                yield group
        finally:
            self._run(groups.aclose())

    @property
    def counts(self) -> Counts:
        """See AsyncRolloutClient.counts."""
        return self._client.counts

    def follow(self, after: int = 0, *, tag: str | None = None, rows: bool = False) -> Iterator[dict[str, Any]]:
        """See AsyncRolloutClient.follow."""
        while True:
            lines, after = self.results(after, tag=tag, rows=rows)
            yield from lines

    def trajectory(self, rollout_id: str) -> dict[str, Any]:
        """See AsyncRolloutClient.trajectory."""
        return self._run(self._client.trajectory(rollout_id))

    def cancel(self, *, rollout_id: str | None = None, group_id: str | None = None) -> dict[str, Any]:
        """See AsyncRolloutClient.cancel."""
        return self._run(self._client.cancel(rollout_id=rollout_id, group_id=group_id))

    def policy(self, version: int | None = None, **options: Any) -> dict[str, Any]:
        """See AsyncRolloutClient.policy."""
        return self._run(self._client.policy(version, **options))

    def status(self) -> dict[str, Any]:
        """See AsyncRolloutClient.status."""
        return self._run(self._client.status())
