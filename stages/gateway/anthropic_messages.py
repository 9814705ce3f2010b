"""Anthropic's messages: requests read, answers and streams written. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from stages.gateway.asks import (
    Answer,
    Ask,
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

    def events(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        """See Dialect."""
        started = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None,
                   "usage": {**_usage(answer), "output_tokens": 1}}  # fmt: skip
        yield data({"type": "message_start", "message": started}, "message_start")
        for index, block in enumerate(_blocks(answer.reply)):
            if block["type"] == "text":
                empty: dict[str, Any] = {"type": "text", "text": ""}
                kind, name, text = "text_delta", "text", block["text"]
            else:
                empty, kind, name = {**block, "input": {}}, "input_json_delta", "partial_json"
                text = msgspec.json.encode(block["input"]).decode()
            yield data({"type": "content_block_start", "index": index, "content_block": empty}, "content_block_start")
            for piece in pieces(text):
                delta = {"type": kind, name: piece}
                yield data({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")
            yield data({"type": "content_block_stop", "index": index}, "content_block_stop")
        ended = {"stop_reason": _STOP[answer.finish], "stop_sequence": answer.stopped_by}
        yield data({"type": "message_delta", "delta": ended, "usage": _usage(answer)}, "message_delta")
        yield data({"type": "message_stop"}, "message_stop")

    def error(self, refused: RefusedError) -> bytes:
        """See Dialect."""
        return msgspec.json.encode(
            {"type": "error", "error": {"type": _TYPES[refused.kind], "message": str(refused)}, "request_id": None}
        )

    def error_event(self, refused: RefusedError) -> bytes:
        """See Dialect."""
        return b"event: error\ndata: " + self.error(refused) + b"\n\n"


def _head(answer: Answer) -> dict[str, Any]:
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
