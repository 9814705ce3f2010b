"""HTTP as the house speaks it: what the client is made of, and calls to the router that find it again when it moves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

import msgspec

from stages import beacon, sharedfs
from stages.connection import ConnectError, ReadError, RequestTimeout, Response, TransportError
from stages.errors import RouterUnreachableError, ServiceError, StageError
from stages.http_client import Client, InvalidURL
from stages.layout import RunLayout

__all__ = [
    "Client", "ConnectError", "InvalidURL", "ReadError", "RequestTimeout", "Response", "RouterLink", "TransportError",
    "error_of",
]  # fmt: skip

RETRY_S: Final = (0.05, 1.0)
RETRIED_STATUS: Final = frozenset({429, 503})
LOOK_S: Final = 5.0
"""A request that takes longer looks whether its router is still the router."""
FINAL_CODES: Final = frozenset({"draining"})
"""Refusals that waiting does not change, whatever their status."""
STALE_EPOCH: Final = "stale_epoch"
UNKNOWN: Final = "unknown"
"""The code of an error without the contract's body."""

T = TypeVar("T")


class _Error(msgspec.Struct):
    code: str
    message: str
    detail: dict[str, Any] = {}


class _ErrorBody(msgspec.Struct):
    error: _Error


_FIXED: Final = frozenset({"status", "code", "message"})


def error_of(response: Response) -> ServiceError:
    """The contract's error body as an exception."""
    try:
        error = msgspec.json.decode(response.content, type=_ErrorBody).error
        code, message, detail = error.code, error.message, error.detail
    except (msgspec.MsgspecError, UnicodeDecodeError):
        code, message, detail = UNKNOWN, response.text[:200] or response.reason_phrase, {}
    return ServiceError(response.status_code, code, message, **{k: v for k, v in detail.items() if k not in _FIXED})


def _names_epoch(body: Any) -> bool:
    return "epoch" in body if isinstance(body, dict) else hasattr(body, "epoch")


class RouterLink:
    """Calls to a run's router, which may die and come back elsewhere with a higher epoch.

    Each call has a deadline; until then connection failures, 429 and 503 are tried again, and router.json is read
    anew.
    """

    def __init__(
        self,
        role: Literal["trainer", "worker"],
        *,
        run_dir: Path | None = None,
        url: str | None = None,
        token: str | None = None,
        patience_s: float = 120.0,
    ) -> None:
        self._layout = RunLayout(run_dir) if run_dir is not None else None
        self._role = role
        self._token = token
        self._url = url
        self._patience_s = patience_s
        self._client = Client()
        self.epoch = 0

    async def __aenter__(self) -> RouterLink:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        answer: type[T],
        headers: dict[str, str] | None = None,
        timeout_s: float = 30.0,
        patience_s: float | None = None,
        final: frozenset[str] = FINAL_CODES,
    ) -> T:
        """One request, its answer decoded.

        Args:
            method: HTTP method.
            path: route with its query.
            body: anything msgspec can encode, or None.
            answer: type to decode the answer to; `bytes` gives it raw.
            headers: more headers.
            timeout_s: seconds for one try.
            patience_s: seconds for all tries.
            final: codes of refusals that are not tried again.

        Raises:
            ServiceError: the router refused for good.
            RouterUnreachableError: no answer within the patience.
        """
        until = time.monotonic() + (self._patience_s if patience_s is None else patience_s)
        while True:
            left_s = max(0.0, until - time.monotonic())
            response = await self.request(
                method, path, body, headers=headers, timeout_s=timeout_s, patience_s=left_s, final=final
            )
            if answer is bytes:
                return response.content  # type: ignore[return-value]
            try:
                return msgspec.json.decode(response.content, type=answer)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                if time.monotonic() + RETRY_S[1] >= until:
                    raise RouterUnreachableError(f"{self._url}{path}: answer not understood: {error}") from error
            await asyncio.sleep(RETRY_S[1])

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float = 30.0,
        patience_s: float | None = None,
        final: frozenset[str] = FINAL_CODES,
    ) -> Response:
        """Like `call`, giving the response itself."""
        patience_s = self._patience_s if patience_s is None else patience_s
        until = time.monotonic() + patience_s
        content = None if body is None else msgspec.json.encode(body)
        wait_s, last = RETRY_S[0], "no router.json yet"
        failure: ServiceError | None = None
        while True:
            try:
                if self._url is None or self._token is None:
                    await self.locate()
                sent = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json", **(headers or {})}
                response = await self._while_current(
                    self._client.request(method, f"{self._url}{path}", content=content, headers=sent, timeout=timeout_s)
                )
            except (TransportError, RouterUnreachableError, OSError) as error:
                failure, last = None, f"{type(error).__name__}: {error}"
            else:
                if response.status_code < 400:
                    return response
                failure = error_of(response)
                # A server error without the contract's body is not the router's word: a server that is being torn
                # down says so, or something between us and it.
                dying = response.status_code >= 500 and failure.code == UNKNOWN
                # A request that names no epoch means the run, not the router that has lost it.
                moved = failure.code == STALE_EPOCH and self._layout is not None and not _names_epoch(body)
                retried = response.status_code in RETRIED_STATUS or dying or moved
                if not retried or failure.code in final:
                    raise failure
                if failure.code == "journal_stalled":
                    # The router lives and says so: that is not what the patience is for.
                    until = time.monotonic() + patience_s
            if time.monotonic() + wait_s >= until:
                if failure is not None:
                    raise failure
                raise RouterUnreachableError(f"router at {self._url}: nothing for {patience_s:g} s: {last}")
            await asyncio.sleep(wait_s)
            wait_s = min(RETRY_S[1], wait_s * 2)
            if self._layout is not None:
                self._url = None

    async def _while_current(self, request: Coroutine[Any, Any, Response]) -> Response:
        """The response, unless a newer router shows itself first: one that was stopped keeps its connections open."""
        if self._layout is None:
            return await request
        found: list[int] = []
        watching: list[asyncio.Task[None]] = []

        async def watch(layout: RunLayout) -> None:
            while True:
                with contextlib.suppress(OSError, StageError):  # it does not read now: the next look may
                    newest = await asyncio.to_thread(beacon.read, layout)
                    if newest is not None and newest.epoch > self.epoch and not newest.ended:
                        found.append(newest.epoch)
                        current.reschedule(0.0)
                        return
                await asyncio.sleep(LOOK_S)

        def begin(layout: RunLayout) -> None:
            watching.append(asyncio.create_task(watch(layout), name="successor"))

        # Almost every request ends before its first look: a timer costs less than a task.
        timer = asyncio.get_running_loop().call_later(LOOK_S, begin, self._layout)
        try:
            async with asyncio.timeout(None) as current:
                return await request
        except TimeoutError as error:
            if not found:
                raise
            raise RouterUnreachableError(f"the router at {self._url} has a successor, epoch {found[0]}") from error
        finally:
            timer.cancel()
            for task in watching:
                task.cancel()

    async def locate(self) -> None:
        """Read router.json (and the token): where the router is now.

        Raises:
            RouterUnreachableError: none has published itself.
        """
        if self._layout is None:
            raise RouterUnreachableError("no run directory and no URL to find the router by")
        try:
            found = await asyncio.to_thread(beacon.read, self._layout)
        except (OSError, StageError) as error:
            raise RouterUnreachableError(f"{self._layout.router_json} does not read now: {error}") from error
        if found is None or found.ended:
            raise RouterUnreachableError(f"{self._layout.router_json} names no living router")
        path = self._layout.trainer_token if self._role == "trainer" else self._layout.worker_token
        if self._token is None:
            self._token = (await asyncio.to_thread(sharedfs.read_bytes, path)).decode().strip()
        self._url, self.epoch = found.url, found.epoch

    async def on_stale_epoch(self) -> None:
        """After a 409 stale_epoch: forget the old router; the next call finds the newer one."""
        self._url, self.epoch = None, 0
        await asyncio.sleep(RETRY_S[0])
