"""The ways engines take tokens and give tokens: vLLM's generate, OpenAI's completions with ids, SGLang's generate.

Each dialect is a request body and a reading of the answer, both pure. vLLM's own is the first choice: it alone tells
the policy version of each span. /v1/completions tells none, so its rows say null; SGLang names one for the whole
answer. A version that is no integer is none. The first two stream as well; SGLang's streams say all log-probs again
with every event, which grows with the square of an answer, so it is asked for whole answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from stages.trajectory import Sampling, VersionSpan
from stages.wire import UNREADABLE


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
    def json(self) -> bytes:
        """All of them as a JSON list."""
        if self._count < len(self):
            comma = b"," if self._count else b""
            self._json += comma + msgspec.json.encode(self[self._count :])[1:-1]
            self._count = len(self)
        return b"".join((self._json, b"]"))


class Piece(msgspec.Struct, frozen=True):
    """What one event of a stream adds: ids with their log-probs; the last ones tell the rest.

    Args:
        token_ids: sampled since the event before.
        logprobs: of them.
        finish_reason: None where the generation goes on.
        versions: of the whole answer; told with its last ids.
        cached_tokens: None where it is not told here.
        versioned: the engine is of a kind that tells versions.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    versions: list[VersionSpan]
    cached_tokens: int | None
    versioned: bool = False


class UnreadableAnswerError(ValueError):
    """An answer of another shape than the dialect's."""


@dataclass(frozen=True)
class Dialect:
    """One way to ask.

    Args:
        path: route.
        ids: the field of a body that holds the stream's ids.
        fields: (request id, model, sampling) -> all other fields of a body.
        read: (answer, seconds) -> Completion; raises UnreadableAnswerError.
        full_id: the id that the engine knows a request by, where it can be aborted by one.
        event: reads one event of a stream; None: such an engine is asked for whole answers alone.
    """

    path: str
    ids: str
    fields: Callable[[str, str, Sampling], dict[str, Any]]
    read: Callable[[bytes, float], Completion]
    full_id: str | None = None
    event: Callable[[bytes], Piece] | None = None

    def body(
        self, request_id: str, model: str, token_ids: Sequence[int], sampling: Sampling, /, **more: Any
    ) -> tuple[bytes, bytes, bytes]:
        """The JSON of a request, in parts: the ids of a long stream are copied once and not joined with the rest."""
        fields = msgspec.json.encode(self.fields(request_id, model, sampling) | more)
        listed = token_ids.json if isinstance(token_ids, Ids) else msgspec.json.encode(token_ids)
        return b'%b,"%b":' % (fields[:-1], self.ids.encode()), listed, b"}"


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


def _vllm_fields(request_id: str, _: str, sampling: Sampling) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p, "logprobs": 0,
    }  # fmt: skip
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    return {"request_id": request_id, "sampling_params": params}


def _completions_fields(request_id: str, model: str, sampling: Sampling) -> dict[str, Any]:
    params = _vllm_fields(request_id, model, sampling)["sampling_params"]
    return {"request_id": request_id, "model": model, **params, "return_token_ids": True, "add_special_tokens": False}


def _sglang_fields(request_id: str, _: str, sampling: Sampling) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
    }  # fmt: skip
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return {"rid": request_id, "sampling_params": params, "return_logprob": True}


def _cached(usage: _Usage | None) -> int:
    details = usage.prompt_tokens_details if usage else None
    return details.cached_tokens or 0 if details else 0


def _read_vllm(content: bytes, llm_s: float) -> Completion:
    generated = _decode(_generated, content)
    choice = generated.choices[0]
    logprobs = [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
    return _whole(
        choice.token_ids, logprobs, choice.finish_reason, _spans(choice), _cached(generated.usage), llm_s
    )  # fmt: skip


def _spans(choice: _Choice) -> list[VersionSpan]:
    return [
        VersionSpan(int(span.version), span.start, span.end)
        for span in choice.weight_versions or []
        if span.version.isdecimal()
    ]


def _vllm_event(content: bytes) -> Piece:
    event = _decode(_generated, content, empty=True)
    cached = None if event.usage is None else _cached(event.usage)
    if not event.choices:
        return Piece([], [], None, [], cached, versioned=True)
    choice = event.choices[0]
    logprobs = [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
    return _piece(choice.token_ids, logprobs, choice.finish_reason, _spans(choice), cached, versioned=True)


def _completions_event(content: bytes) -> Piece:
    event = _decode(_completed, content, empty=True)
    cached = None if event.usage is None else _cached(event.usage)
    if not event.choices:
        return Piece([], [], None, [], cached)
    choice = event.choices[0]
    logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
    return _piece(choice.token_ids, logprobs, choice.finish_reason, [], cached, versioned=False)


def _piece(
    ids: list[int], logprobs: list[float], finish: str | None, spans: list[VersionSpan], cached: int | None, *,
    versioned: bool,
) -> Piece:  # fmt: skip
    if len(logprobs) != len(ids):
        raise UnreadableAnswerError(f"an event with {len(ids)} tokens but {len(logprobs)} log-probs")
    return Piece(ids, logprobs, finish, spans, cached, versioned)


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


def _decode(decoder: msgspec.json.Decoder[Any], content: bytes, *, empty: bool = False) -> Any:
    try:
        answer = decoder.decode(content)
    except UNREADABLE as error:
        raise UnreadableAnswerError(str(error)) from error
    if not empty and getattr(answer, "choices", True) == []:
        raise UnreadableAnswerError("no choices")
    return answer


VLLM: Final = Dialect(
    "/inference/v1/generate", "token_ids", _vllm_fields, _read_vllm, "generate-tokens-{}", _vllm_event
)
COMPLETIONS: Final = Dialect(
    "/v1/completions", "prompt", _completions_fields, _read_completions, "cmpl-{}-0", _completions_event
)
SGLANG: Final = Dialect("/generate", "input_ids", _sglang_fields, _read_sglang)
DIALECTS: Final = (VLLM, COMPLETIONS, SGLANG)
"""In the order in which an engine is asked whether it knows them."""
