"""The ways engines take tokens and give tokens: vLLM's generate, OpenAI's completions with ids, SGLang's generate.

Each dialect is a request body and a reading of the answer, both pure. vLLM's own is the first choice: it alone tells
the policy version of each span. /v1/completions tells none, so its rows say null; SGLang names one for the whole
answer. A version that is no integer is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from stages.trajectory import Sampling, VersionSpan


class Completion(msgspec.Struct, frozen=True):
    """What the engine sampled: ids, log-probs of the distribution sampled from, version spans relative to the ids."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[VersionSpan]
    cached_tokens: int
    llm_s: float


class Ids(list[int]):
    """The ids of a stream that grows at its end; their JSON grows with them, as they go to an engine at every turn.

    Encoding 16,000 of them anew takes 0.2-0.3 ms, most of what a turn costs. Whoever takes ids back calls `cut`.
    """

    def __init__(self, ids: Iterable[int] = ()) -> None:
        super().__init__(ids)
        self._json, self._count = bytearray(b"["), 0

    def cut(self, length: int) -> None:
        """Take back all but so many."""
        del self[length:]
        if length < self._count:
            self._json, self._count = bytearray(b"["), 0

    @property
    def json(self) -> msgspec.Raw:
        """All of them as a JSON list."""
        if self._count < len(self):
            comma = b"," if self._count else b""
            self._json += comma + msgspec.json.encode(self[self._count :])[1:-1]
            self._count = len(self)
        return msgspec.Raw(self._json + b"]")


class UnreadableAnswerError(ValueError):
    """An answer of another shape than the dialect's."""


@dataclass(frozen=True)
class Dialect:
    """One way to ask.

    Args:
        path: route.
        body: (request id, model, ids, sampling) -> JSON body.
        read: (answer, seconds) -> Completion; raises UnreadableAnswerError.
        full_id: the id that the engine knows a request by, where it can be aborted by one.
    """

    path: str
    body: Callable[[str, str, Sequence[int], Sampling], dict[str, Any]]
    read: Callable[[bytes, float], Completion]
    full_id: str | None = None


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


class _Generated(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _TextLogProbs(msgspec.Struct):
    token_logprobs: list[float]


class _TextChoice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: _TextLogProbs | None = None


class _Completed(msgspec.Struct):
    choices: list[_TextChoice]
    usage: _Usage | None = None


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, Any]] = []
    finish_reason: _Finish | None = None
    cached_tokens: int = 0
    weight_version: str | None = None


class _Sglang(msgspec.Struct):
    meta_info: _Meta


def _vllm_body(request_id: str, _: str, ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p, "logprobs": 0,
    }  # fmt: skip
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    return {"request_id": request_id, "token_ids": _json(ids), "sampling_params": params}


def _completions_body(request_id: str, model: str, ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    body = _vllm_body(request_id, model, ids, sampling)
    return {
        "request_id": request_id, "model": model, "prompt": body["token_ids"], **body["sampling_params"],
        "return_token_ids": True, "add_special_tokens": False,
    }  # fmt: skip


def _sglang_body(request_id: str, _: str, ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
    }  # fmt: skip
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return {"rid": request_id, "input_ids": _json(ids), "sampling_params": params, "return_logprob": True}


def _json(ids: Sequence[int]) -> Any:
    return ids.json if isinstance(ids, Ids) else ids


def _cached(usage: _Usage | None) -> int:
    details = usage.prompt_tokens_details if usage else None
    return details.cached_tokens or 0 if details else 0


def _read_vllm(content: bytes, llm_s: float) -> Completion:
    generated = _decode(_generated, content)
    choice = generated.choices[0]
    logprobs = [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
    spans = [
        VersionSpan(int(span.version), span.start, span.end)
        for span in choice.weight_versions or []
        if span.version.isdecimal()
    ]
    return _whole(choice.token_ids, logprobs, choice.finish_reason, spans, _cached(generated.usage), llm_s)


def _read_completions(content: bytes, llm_s: float) -> Completion:
    completed = _decode(_completed, content)
    choice = completed.choices[0]
    logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
    return _whole(choice.token_ids, logprobs, choice.finish_reason, [], _cached(completed.usage), llm_s)


def _read_sglang(content: bytes, llm_s: float) -> Completion:
    meta = _decode(_sglang, content).meta_info
    ids = [entry[1] for entry in meta.output_token_logprobs]
    logprobs = [entry[0] for entry in meta.output_token_logprobs]
    version = meta.weight_version
    spans = [VersionSpan(int(version), 0, len(ids))] if version is not None and version.isdecimal() and ids else []
    finish = meta.finish_reason.type if meta.finish_reason else None
    return _whole(ids, logprobs, finish, spans, meta.cached_tokens, llm_s)


def _whole(
    ids: list[int], logprobs: list[float], finish: str | None, spans: list[VersionSpan], cached: int, llm_s: float
) -> Completion:
    if len(logprobs) != len(ids):
        raise UnreadableAnswerError(f"{len(ids)} tokens but {len(logprobs)} log-probs")
    return Completion(ids, logprobs, finish or "stop", spans, cached, llm_s)


_generated: Final = msgspec.json.Decoder(_Generated)
_completed: Final = msgspec.json.Decoder(_Completed)
_sglang: Final = msgspec.json.Decoder(_Sglang)


def _decode(decoder: msgspec.json.Decoder[Any], content: bytes) -> Any:
    try:
        answer = decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableAnswerError(str(error)) from error
    if getattr(answer, "choices", True) == []:
        raise UnreadableAnswerError("no choices")
    return answer


VLLM: Final = Dialect("/inference/v1/generate", _vllm_body, _read_vllm, "generate-tokens-{}")
COMPLETIONS: Final = Dialect("/v1/completions", _completions_body, _read_completions, "cmpl-{}-0")
SGLANG: Final = Dialect("/generate", _sglang_body, _read_sglang)
DIALECTS: Final = (VLLM, COMPLETIONS, SGLANG)
"""In the order in which an engine is asked whether it knows them."""
