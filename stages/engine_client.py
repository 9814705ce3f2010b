"""Token-in/token-out calls to an engine in vLLM's wire format: POST /inference/v1/generate."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from stages.errors import ContextLengthError, LLMError
from stages.http import InvalidURL, TransportError, error_of, make_client
from stages.trajectory import Sampling, VersionSpan

MODELS_TIMEOUT_S: Final = 10.0


class Completion(msgspec.Struct, frozen=True):
    """What the engine sampled: ids, log-probs of the distribution sampled from, version spans relative to the ids."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[VersionSpan]
    cached_tokens: int
    llm_s: float


class EngineUnavailableError(LLMError):
    """The replica gave no answer at all: another one, or a second try, may."""


class _LogProb(msgspec.Struct):
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_LogProb]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: _LogProbs | None = None
    weight_versions: list[_Span] | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _CachedTokens | None = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Model]


class _Generated(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Generated)


class EngineClient:
    """One HTTP client for all replicas of a fleet; use as an async context manager."""

    def __init__(self, *, api_key: str | None = None, connections: int = 1024) -> None:
        self._client = make_client(connections=connections)
        self._headers = {"Content-Type": "application/json"}
        self._context_lengths: dict[str, int] = {}
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
        if url not in self._context_lengths:
            try:
                response = await self._client.get(f"{url}/v1/models", headers=self._headers, timeout=MODELS_TIMEOUT_S)
                models = msgspec.json.decode(response.content, type=_Models)
                self._context_lengths[url] = models.data[0].max_model_len
            except (*TransportError, InvalidURL, msgspec.MsgspecError, IndexError) as error:
                raise EngineUnavailableError(f"replica {url} does not tell its models: {error}") from error
        return self._context_lengths[url]

    async def generate(
        self, url: str, token_ids: Sequence[int], sampling: Sampling, *, name: str, timeout_s: float
    ) -> Completion:
        """Sample a continuation of the stream.

        Args:
            url: the replica's base URL.
            token_ids: the whole stream so far.
            sampling: its `max_tokens` bounds this call.
            name: names the request in the engine's logs; a random suffix makes a second try another request.
            timeout_s: seconds until the answer must be there.

        Raises:
            EngineUnavailableError: no connection, no answer in time, or a server error.
            ContextLengthError: the engine says that the stream is too long.
            LLMError: the engine refused the request; a second try would be refused too.
        """
        params: dict[str, Any] = {
            "max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "logprobs": 0,
        }  # fmt: skip
        if sampling.seed is not None:
            params["seed"] = sampling.seed
        request_id = f"{name}-{secrets.token_hex(3)}"
        body = {"request_id": request_id, "token_ids": list(token_ids), "sampling_params": params}
        started = time.perf_counter()
        try:
            response = await self._client.post(
                f"{url}/inference/v1/generate",
                content=msgspec.json.encode(body),
                headers=self._headers,
                timeout=timeout_s,
            )
        except (*TransportError, InvalidURL) as error:
            raise EngineUnavailableError(f"replica {url}: {type(error).__name__}: {error}") from error
        llm_s = time.perf_counter() - started
        if response.status_code >= 400:
            raise _refused(url, response.status_code, str(error_of(response)), len(token_ids))
        return _completion(url, response.content, llm_s)


def _refused(url: str, status: int, message: str, length: int) -> LLMError | ContextLengthError:
    if status in {408, 409, 425, 429} or status >= 500:
        return EngineUnavailableError(f"replica {url} answered {status}: {message}")
    if "maximum context length" in message or "max_model_len" in message or "longer than" in message:
        return ContextLengthError(f"the stream of {length} tokens is too long: {message}")
    return LLMError(f"replica {url} refused the request with {status}: {message}", final=True)


def _completion(url: str, content: bytes, llm_s: float) -> Completion:
    try:
        generated = _decoder.decode(content)
        choice = generated.choices[0]
        logprobs = [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
    except (msgspec.MsgspecError, IndexError) as error:
        raise EngineUnavailableError(f"replica {url}: answer not understood: {error}") from error
    if len(logprobs) != len(choice.token_ids):
        message = f"replica {url}: {len(choice.token_ids)} tokens but {len(logprobs)} log-probs"
        raise LLMError(message, final=True)
    spans = [
        VersionSpan(int(span.version), span.start, span.end)
        for span in choice.weight_versions or []
        if span.version.isdecimal()
    ]
    details = generated.usage.prompt_tokens_details if generated.usage else None
    cached = details.cached_tokens or 0 if details else 0
    return Completion(choice.token_ids, logprobs, choice.finish_reason or "stop", spans, cached, llm_s)
