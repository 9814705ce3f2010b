"""Answers as server-sent events: a chunk for each draw, then the usage where asked for, then the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from stages.engine.answers import (
    FINGERPRINT,
    Answer,
    completion_logprobs,
    generate_logprobs,
    text_logprobs,
    token_ids,
    usage,
)
from stages.engine.chats import finish_reason, read_calls
from stages.engine.sequence import Sequence

MEDIA_TYPE = "text/event-stream; charset=utf-8"
_HALF = "�"
"""What the beginning of a character decodes to."""

Chunk = Callable[[int, int, str], dict[str, Any]]
"""From the drawn tokens [start, end) and the text that they add to one event."""


def event(value: object) -> bytes:
    """One event; text is its only line."""
    body = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
    return b"data: " + body + b"\n\n"


class _Texts:
    """What each chunk adds to the text: characters that are not whole yet wait for the next one."""

    def __init__(self, sequence: Sequence, about: Answer) -> None:
        self._sequence, self._about = sequence, about
        self._sent = 0

    def more(self, drawn: int) -> str:
        text = self._about.decoder.answer(self._sequence, drawn)
        if self._sequence.finish_reason is None:
            text = text.rstrip(_HALF)
        added, self._sent = text[self._sent :], max(self._sent, len(text))
        return added


def _counts(sequence: Sequence, **more: int) -> dict[str, Any]:
    """Usage as streams tell it: shorter than elsewhere."""
    counts = usage([sequence])
    counts.pop("completion_tokens_details")
    return {**counts, "prompt_tokens_details": {"cached_tokens": sequence.cached_tokens or 0, **more}}


async def generate_events(
    draws: AsyncIterator[int], sequence: Sequence, about: Answer, *, with_usage: bool
) -> AsyncIterator[bytes]:
    """The events of /inference/v1/generate."""

    def shell(choices: list[dict[str, Any]], counts: object = None) -> bytes:
        mode = "text" if about.as_text else "tokens"
        return event({"request_id": about.request_id, "usage": counts, "output_mode": mode, "choices": choices})

    texts, start = _Texts(sequence, about), 0
    async for end in draws:
        over = sequence.finish_reason is not None
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "token_ids": token_ids(sequence)[start:end],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": sequence.versions if over else None,
        }
        if about.as_text:
            choice["text"] = texts.more(end)
        choice["logprobs"] = generate_logprobs(sequence, sequence.drawn[start:end], about)
        yield shell([choice])
        start = end
    if with_usage:
        yield shell([], _counts(sequence))
    yield event("[DONE]")


async def completion_events(
    draws: AsyncIterator[int], sequence: Sequence, about: Answer, *, with_usage: bool
) -> AsyncIterator[bytes]:
    """The events of /v1/completions; vLLM tells the usage also unasked where ids are."""
    head = {"id": about.request_id, "object": "text_completion", "created": about.created, "model": about.model}
    texts, start, offset = _Texts(sequence, about), 0, 0
    async for end in draws:
        text, drawn = texts.more(end), sequence.drawn[start:end]
        logprobs = None
        if sequence.params.logprobs is not None:
            logprobs = completion_logprobs(drawn, about.decoder, as_ids=about.as_ids, offset=offset)
            offset += sum(len(token) for token in logprobs["tokens"])
        choice = {
            "index": 0,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "prompt_token_ids": sequence.prompt if about.with_ids and not start else None,
            "token_ids": token_ids(sequence)[start:end] if about.with_ids else None,
        }
        yield event({**head, "choices": [choice]})
        start = end
    if with_usage:
        yield event({**head, "choices": [], "usage": _counts(sequence), "system_fingerprint": FINGERPRINT})
    yield event("[DONE]")


async def chat_events(
    draws: AsyncIterator[int], sequence: Sequence, about: Answer, *, with_usage: bool
) -> AsyncIterator[bytes]:
    """The events of /v1/chat/completions. Where tools were offered, text and calls come whole with the last chunk."""
    head = {"id": about.request_id, "object": "chat.completion.chunk", "created": about.created, "model": about.model}
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ids = sequence.prompt if about.with_ids else None
    yield event({**head, "choices": [first], "prompt_token_ids": ids, "prompt_text": None})
    texts, start = _Texts(sequence, about), 0
    async for end in draws:
        over = sequence.finish_reason is not None
        delta, calls = _delta(sequence, about, texts, end, over=over)
        logprobs = None
        if sequence.params.logprobs is not None:
            logprobs = text_logprobs(sequence.drawn[start:end], about.decoder, about.top_logprobs, as_ids=about.as_ids)
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": logprobs}
        choice["finish_reason"] = finish_reason(sequence, calls)
        if over:
            choice["stop_reason"] = sequence.stop_reason
        choice["token_ids"] = token_ids(sequence)[start:end] if about.with_ids else None
        last = {"system_fingerprint": FINGERPRINT} if over and not with_usage else {}
        yield event({**head, "choices": [choice], **last})
        start = end
    if with_usage:
        counts = _counts(sequence, created_cache_tokens=0)
        yield event({**head, "choices": [], "usage": counts, "system_fingerprint": FINGERPRINT})
    yield event("[DONE]")


def _delta(
    sequence: Sequence, about: Answer, texts: _Texts, end: int, *, over: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if not about.parse_tools:
        return {"content": texts.more(end)}, []
    if not over:
        return {}, []
    content, calls = read_calls(about.decoder.answer(sequence))
    if not calls:
        return {"content": content}, []
    return {"content": content, "tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}, calls
