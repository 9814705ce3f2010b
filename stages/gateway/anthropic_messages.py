"""Anthropic's messages: requests read, answers and streams written. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from stages.gateway.asks import (
    Answer,
    Ask,
    Teller,
    call_of,
    data,
    decoded,
    function,
    pieces,
    positive,
    refuse_fields,
    stops,
    text_of,
)
from stages.gateway.errors import RefusedError, invalid
from stages.gateway.live import Started
from stages.trajectory import Message, ToolCall

_TYPES: Final = {
    "invalid_request": "invalid_request_error", "authentication": "authentication_error",
    "permission": "permission_error", "not_found": "not_found_error", "too_large": "request_too_large",
    "rate_limit": "rate_limit_error", "overloaded": "overloaded_error", "server": "api_error",
}  # fmt: skip
_STOP: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "stop_string": "stop_sequence"}
_HIDDEN: Final = ("thinking", "redacted_thinking")
"""Blocks that no answer of ours holds; a client that brings them has them from elsewhere."""


class _Tool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: Any = None
    type: str | None = None


class _Said(msgspec.Struct):
    role: str
    content: Any


class _Choice(msgspec.Struct):
    type: str


class _Messages(msgspec.Struct):
    messages: list[_Said]
    model: str = ""
    max_tokens: int | None = None
    system: Any = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    stop_sequences: Any = None
    stream: bool | None = None
    mcp_servers: Any = None
    container: Any = None


class Messages:
    """POST /v1/messages; with `counting` POST /v1/messages/count_tokens, which samples nothing."""

    history: str | None = "messages"
    ping: bytes = data({"type": "ping"}, "ping")

    def __init__(self, *, counting: bool = False) -> None:
        self._counting = counting

    def read(self, body: bytes) -> Ask:
        """See Dialect."""
        given = decoded(body, _Messages)
        refuse_fields({"mcp_servers": given.mcp_servers, "container": given.container})
        choice = "auto" if given.tool_choice is None else given.tool_choice.type
        if choice not in ("auto", "none"):
            refuse_fields({"tool_choice": choice}, "nothing can make the policy call a tool")
        if given.max_tokens is None and not self._counting:
            raise invalid("max_tokens: Field required", "max_tokens")
        messages: list[Message] = []
        if system := text_of(given.system, "system"):
            messages.append(Message("system", system))
        for number, said in enumerate(given.messages):
            messages += _read(said, f"messages.{number}")
        return Ask(
            model=given.model, messages=tuple(messages), instructions=int(bool(system)),
            tools=tuple(_tool(one, n) for n, one in enumerate(given.tools or [])),
            parse=bool(given.tools) and choice != "none", max_tokens=positive(given.max_tokens, "max_tokens"),
            stop=stops(given.stop_sequences, "stop_sequences"), stream=bool(given.stream) and not self._counting,
            count=self._counting,
        )  # fmt: skip

    def write(self, ask: Ask, answer: Answer) -> bytes:
        """See Dialect."""
        if self._counting:
            return msgspec.json.encode({"input_tokens": answer.prompt_tokens})
        reason = _STOP[answer.finish]
        return msgspec.json.encode({**_head(answer), "content": _blocks(answer.reply), "stop_reason": reason,
                                    "stop_sequence": answer.stopped_by, "usage": _usage(answer)})  # fmt: skip

    def teller(self, ask: Ask) -> Teller:
        """See Dialect."""
        return _Teller()

    def error(self, refused: RefusedError) -> bytes:
        """See Dialect."""
        return msgspec.json.encode(
            {"type": "error", "error": {"type": _TYPES[refused.kind], "message": str(refused)}, "request_id": None}
        )

    def error_event(self, refused: RefusedError) -> bytes:
        """See Dialect."""
        return b"event: error\ndata: " + self.error(refused) + b"\n\n"


class _Teller:
    """See stages.gateway.asks.Teller; the text is the first block where there is any."""

    def __init__(self) -> None:
        self._blocks = 0

    def begin(self, started: Started) -> Iterator[bytes]:
        """See Teller; how much of the prompt was cached is told at the end."""
        counts = {"input_tokens": started.prompt_tokens, "output_tokens": 1, "cache_read_input_tokens": 0,
                  "cache_creation_input_tokens": 0}  # fmt: skip
        message = {**_head(started), "content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}
        yield data({"type": "message_start", "message": message}, "message_start")

    def text(self, text: str) -> Iterator[bytes]:
        """See Teller."""
        if not self._blocks:
            yield self._open({"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def end(self, answer: Answer) -> Iterator[bytes]:
        """See Teller."""
        if self._blocks:
            yield self._close()
        for block in _blocks(answer.reply):
            if block["type"] == "tool_use":
                yield self._open({**block, "input": {}})
                for piece in pieces(msgspec.json.encode(block["input"]).decode()):
                    yield self._delta({"type": "input_json_delta", "partial_json": piece})
                yield self._close()
        ended = {"stop_reason": _STOP[answer.finish], "stop_sequence": answer.stopped_by}
        yield data({"type": "message_delta", "delta": ended, "usage": _usage(answer)}, "message_delta")
        yield data({"type": "message_stop"}, "message_stop")

    def _open(self, block: dict[str, Any]) -> bytes:
        self._blocks += 1
        return self._event("content_block_start", content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._event("content_block_delta", delta=delta)

    def _close(self) -> bytes:
        return self._event("content_block_stop")

    def _event(self, kind: str, **value: Any) -> bytes:
        return data({"type": kind, "index": self._blocks - 1, **value}, kind)


def _head(answer: Started) -> dict[str, Any]:
    return {"id": f"msg_{answer.number}", "type": "message", "role": "assistant", "model": answer.model}


def _usage(answer: Answer) -> dict[str, Any]:
    """Here the cached part of a prompt is not counted among its input tokens."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens, "output_tokens": answer.completion_tokens,
        "cache_read_input_tokens": answer.cached_tokens, "cache_creation_input_tokens": 0,
    }  # fmt: skip


def _blocks(reply: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": reply.content}] if reply.content else []
    calls = [call for call in reply.tool_calls if call.error is None]
    return blocks + [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in calls]


def _read(said: _Said, where: str) -> list[Message]:
    """One message of theirs; results of tools, which stand in a user's message, become messages of their own."""
    if said.role not in ("user", "assistant", "system"):
        raise invalid(f"{where}: role must be user or assistant, got {said.role!r}", where)
    if isinstance(said.content, str):
        return [Message(said.role, said.content)]  # type: ignore[arg-type]
    if not isinstance(said.content, list) or not all(isinstance(block, dict) for block in said.content):
        raise invalid(f"{where}.content is neither a text nor a list of blocks", where)
    texts: list[Any] = []
    calls: list[ToolCall] = []
    results: list[Message] = []
    for block in said.content:
        kind = block.get("type")
        if kind == "tool_use" and said.role == "assistant":
            calls.append(call_of(str(block.get("name")), block.get("input"), str(block.get("id"))))
        elif kind == "tool_result" and said.role == "user":
            text = text_of(block.get("content"), f"{where}.content")
            results.append(Message("tool", text, tool_call_id=str(block.get("tool_use_id"))))
        elif kind not in _HIDDEN:
            texts.append(block)
    content = text_of(texts, f"{where}.content")
    if said.role == "assistant":
        return [Message("assistant", content, tuple(calls))]
    return [*results, *([Message(said.role, content)] if texts or not results else [])]  # type: ignore[arg-type]


def _tool(tool: _Tool, number: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise invalid(f"tools.{number} is of type {tool.type!r}; this gateway knows tools of the client alone", "tools")
    return function(tool.name, tool.description, tool.input_schema)
