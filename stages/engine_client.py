"""Token-in/token-out calls to engines: the dialect that an engine speaks, and every failure by its kind.

The hot path of a RUN worker: four calls a rollout. Its client is ours over httptools (CPU a call at 64 and 1,024 in
flight, side by side at one load: 0.08 and 0.08 ms; httpx over aiohttp 0.65 and 0.67; plain httpx is quadratic in
connections: 421 requests/s at 64 in flight, where httpx over aiohttp made 3,093 and aiohttp alone 8,595).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from stages.dialects import DIALECTS, VLLM, Completion, Dialect, UnreadableAnswerError
from stages.errors import ContextLengthError, LLMError
from stages.hearing import Events, Hear
from stages.http import Client, ConnectError, InvalidURL, RequestTimeout, TransportError, error_of
from stages.trajectory import Sampling
from stages.wire import UNREADABLE

__all__ = ["Completion", "EngineClient", "EngineUnavailableError"]

MODELS_TIMEOUT_S: Final = 10.0
ABORT_TIMEOUT_S: Final = 2.0
MAX_RETRY_AFTER_S: Final = 30.0
_UNKNOWN_ROUTE: Final = frozenset({404, 405})
_STREAMS_REFUSED: Final = frozenset({400, 422, 501})
_TRY_AGAIN: Final = frozenset({408, 409, 425, 429})

Kind = Literal["connect", "read", "timeout", "busy", "server", "answer"]


class EngineUnavailableError(LLMError):
    """The replica gave no usable answer: another one, or a second try, may.

    Args:
        message: what happened.
        kind: `connect` nothing was sent; `read` the connection broke; `timeout`; `busy` it asks to come again; `server`
            it failed; `answer` it is no answer.
        retry_after_s: how long it asks to stay away, s.
    """

    def __init__(self, message: str, kind: Kind = "server", retry_after_s: float = 0.0) -> None:
        super().__init__(message, kind=kind)
        self.kind = kind
        self.retry_after_s = retry_after_s


class _Model(msgspec.Struct):
    id: str
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Model]


class EngineClient:
    """One HTTP client for all replicas of a fleet; use as an async context manager."""

    def __init__(self, *, api_key: str | None = None, connections: int = 1024) -> None:
        self._client = Client(connections=connections)
        self._headers = {"Content-Type": "application/json"}
        self._models: dict[str, _Model] = {}
        self._dialects: dict[str, Dialect] = {}
        self._whole: set[str] = set()
        """Replicas that refuse to stream."""
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def context_length(self, url: str) -> int:
        """Tokens that a stream may have on this replica, by its own word.

        Raises:
            EngineUnavailableError: no understandable answer.
        """
        return (await self._model(url)).max_model_len

    async def _model(self, url: str) -> _Model:
        if url not in self._models:
            try:
                async with asyncio.timeout(MODELS_TIMEOUT_S):
                    response = await self._client.get(f"{url}/v1/models", headers=self._headers)
                if response.status_code >= 400:
                    raise _refused(url, response.status_code, str(error_of(response)), 0, response.headers)
                self._models[url] = msgspec.json.decode(response.content, type=_Models).data[0]
            except TimeoutError as error:
                raise EngineUnavailableError(f"replica {url} does not tell its models", "timeout") from error
            except (TransportError, InvalidURL) as error:
                raise EngineUnavailableError(f"replica {url} does not tell its models: {error}", "connect") from error
            except (*UNREADABLE, IndexError) as error:
                raise EngineUnavailableError(f"replica {url} does not tell its models: {error}", "answer") from error
        return self._models[url]

    async def generate(
        self, url: str, token_ids: Sequence[int], sampling: Sampling, *, name: str, timeout_s: float,
        model: str | None = None, hear: Hear | None = None,
    ) -> Completion:  # fmt: skip
        """Sample a continuation of the stream.

        Args:
            url: the replica's base URL.
            token_ids: the whole stream so far.
            sampling: its `max_tokens` bounds this call.
            name: names the request in the engine's logs; a random suffix makes a second try another request.
            timeout_s: seconds until the whole answer must be there.
            model: the LoRA adapter to sample from; None: the model that the replica serves.
            hear: gets what is sampled as it comes, from engines that stream; the completion has all of it again.

        Raises:
            EngineUnavailableError: no connection, no answer in time, or a server error.
            ContextLengthError: the engine says that the stream is too long.
            LLMError: the engine refused the request; a second try would be refused too.
        """
        known = self._dialects.get(url)
        for dialect in DIALECTS if known is None else (known,):
            events = None
            if hear is not None and dialect.event is not None and url not in self._whole:
                events = Events(dialect.event, hear)
            content, llm_s = await self._ask(url, dialect, token_ids, sampling, name, timeout_s, model, events)
            if content is None:
                continue
            self._dialects[url] = dialect
            try:
                if events is not None and events.began:
                    return events.completion(llm_s)
                return dialect.read(content, llm_s)
            except UnreadableAnswerError as error:
                raise EngineUnavailableError(f"replica {url}: answer not understood: {error}", "answer") from error
        # A server in place of the one that was there speaks another dialect perhaps: it is asked anew next time.
        self._dialects.pop(url, None)
        self._whole.discard(url)
        self._models.pop(url, None)
        paths = ", ".join(dialect.path for dialect in (DIALECTS if known is None else (known,)))
        raise EngineUnavailableError(f"replica {url} knows none of {paths}", "server")

    async def _ask(
        self, url: str, dialect: Dialect, ids: Sequence[int], sampling: Sampling, name: str, timeout_s: float,
        adapter: str | None, events: Events | None = None,
    ) -> tuple[bytes | None, float]:  # fmt: skip
        """The answer and its seconds; None for a route that the engine does not have."""
        model = adapter or ("" if dialect is VLLM else (await self._model(url)).id)
        request_id = f"{name}-{secrets.token_hex(3)}"
        more: dict[str, Any] = {} if adapter is None else {"model": adapter}
        if events is not None:
            more |= {"stream": True, "stream_options": {"include_usage": True}}
        body = dialect.body(request_id, model, ids, sampling, **more)
        started = time.perf_counter()
        try:
            response = await self._client.post(
                f"{url}{dialect.path}", hear=events, content=body, headers=self._headers, timeout=timeout_s
            )
        except RequestTimeout as error:
            await self._abort(url, dialect, request_id)
            raise EngineUnavailableError(f"replica {url}: no whole answer within {timeout_s:g} s", "timeout") from error
        except (TransportError, InvalidURL) as error:
            sent = not isinstance(error, (ConnectError, InvalidURL))
            if sent:
                await self._abort(url, dialect, request_id)
            message = f"replica {url}: {type(error).__name__}: {error}"
            raise EngineUnavailableError(message, "read" if sent else "connect") from error
        if response.status_code in _UNKNOWN_ROUTE and b'"error"' not in response.content:
            return None, 0.0
        if events is not None and response.status_code in _STREAMS_REFUSED and b"stream" in response.content:
            whole = await self._ask(url, dialect, ids, sampling, name, timeout_s, adapter)
            self._whole.add(url)  # it was that, and nothing else in the request
            return whole
        if response.status_code >= 400:
            raise _refused(url, response.status_code, str(error_of(response)), len(ids), response.headers)
        return response.content, time.perf_counter() - started

    async def _abort(self, url: str, dialect: Dialect, request_id: str) -> None:
        """A request whose answer nobody will read does not go on: the engine may not have noticed that we left."""
        body: dict[str, Any] = {"rid": request_id}
        path = "/abort_request"
        if dialect.full_id is not None:
            path, body = "/inference/v1/abort_requests", {"request_ids": [dialect.full_id.format(request_id)]}
        with contextlib.suppress(TimeoutError, InvalidURL, TransportError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._client.post(f"{url}{path}", content=msgspec.json.encode(body), headers=self._headers)


def _refused(
    url: str, status: int, message: str, length: int, headers: Mapping[str, str]
) -> LLMError | ContextLengthError:
    if status in _TRY_AGAIN or status >= 500:
        kind: Kind = "busy" if status in {429, 503} else "server"
        return EngineUnavailableError(f"replica {url} answered {status}: {message}", kind, _retry_after(headers))
    if "maximum context length" in message or "max_model_len" in message or "longer than" in message:
        return ContextLengthError(f"the stream of {length} tokens is too long: {message}")
    return LLMError(f"replica {url} refused the request with {status}: {message}", final=True)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks for; a date or nonsense counts as none."""
    try:
        return min(MAX_RETRY_AFTER_S, max(0.0, float(headers.get("retry-after", "0"))))
    except ValueError:
        return 0.0
