"""OpenAI's responses: requests read, answers and streams written. Pure."""

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
    text_of,
)
from stages.gateway.errors import invalid
from stages.gateway.live import Started
from stages.gateway.openai_chat import OpenAIErrors
from stages.trajectory import Message, ToolCall

_TEXTS: Final = ("input_text", "output_text", "text")
_IGNORED: Final = ("reasoning",)


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: Any = None


class _Responses(msgspec.Struct):
    input: Any = None
    model: str = ""
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    text: dict[str, Any] | None = None


class Responses(OpenAIErrors):
    """POST /v1/responses."""

    history: str | None = "input"

    def read(self, body: bytes) -> Ask:
        """See Dialect."""
        given = decoded(body, _Responses)
        form = (given.text or {}).get("format")
        form = form.get("type") if isinstance(form, dict) else form
        refuse_fields(
            {"background": given.background, "conversation": given.conversation, "prompt": given.prompt,
             "text.format": form not in (None, "text")}
        )  # fmt: skip
        if given.tool_choice not in (None, "auto", "none"):
            refuse_fields({"tool_choice": given.tool_choice}, "nothing can make the policy call a tool")
        instructions = [Message("system", given.instructions)] if given.instructions else []
        return Ask(
            model=given.model, messages=(*instructions, *_items(given.input)), instructions=len(instructions),
            tools=tuple(_tool(one, n) for n, one in enumerate(given.tools or [])),
            parse=bool(given.tools) and given.tool_choice != "none", previous=given.previous_response_id,
            max_tokens=positive(given.max_output_tokens, "max_output_tokens"), stream=bool(given.stream),
        )  # fmt: skip

    def write(self, ask: Ask, answer: Answer) -> bytes:
        """See Dialect."""
        return msgspec.json.encode(_response(ask, answer, _output(answer)))

    def teller(self, ask: Ask) -> Teller:
        """See Dialect."""
        return _Teller(ask)


class _Teller:
    """See stages.gateway.asks.Teller; the message is the first item where there is any text."""

    def __init__(self, ask: Ask) -> None:
        self._ask, self._number = ask, 0
        self._message: dict[str, Any] = {}
        self._at: dict[str, Any] = {}

    def begin(self, started: Started) -> Iterator[bytes]:
        """See Teller."""
        self._message = _message(started)
        begun = _response(self._ask, started, [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def text(self, text: str) -> Iterator[bytes]:
        """See Teller."""
        if not self._at:
            self._at = {"output_index": 0, "item_id": self._message["id"], "content_index": 0}
            yield self._event("response.output_item.added", output_index=0, item=self._message)
            yield self._event("response.content_part.added", **self._at, part=_part(""))
        yield self._event("response.output_text.delta", **self._at, delta=text, logprobs=[])

    def end(self, answer: Answer) -> Iterator[bytes]:
        """See Teller."""
        output = _output(answer)
        for index, item in enumerate(output):
            if item["type"] == "message":
                if self._at:
                    part = item["content"][0]
                    yield self._event("response.output_text.done", **self._at, text=part["text"], logprobs=[])
                    yield self._event("response.content_part.done", **self._at, part=part)
            else:
                yield from self._call(index, item)
            yield self._event("response.output_item.done", output_index=index, item=item)
        ended = _response(self._ask, answer, output)
        yield self._event(f"response.{ended['status']}", response=ended)

    def _call(self, index: int, item: dict[str, Any]) -> Iterator[bytes]:
        at = {"output_index": index, "item_id": item["id"]}
        opened = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=index, item=opened)
        for piece in pieces(item["arguments"]):
            yield self._event("response.function_call_arguments.delta", **at, delta=piece)
        yield self._event("response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"])

    def _event(self, kind: str, **value: Any) -> bytes:
        self._number += 1
        return data({"type": kind, "sequence_number": self._number - 1, **value}, kind)


def _response(ask: Ask, answer: Started, output: list[dict[str, Any]]) -> dict[str, Any]:
    """The response as it stands: an Answer is whole."""
    cut = isinstance(answer, Answer) and answer.finish == "length"
    status = ("incomplete" if cut else "completed") if isinstance(answer, Answer) else "in_progress"
    tools = [{"type": "function", "strict": False, "description": None, **one["function"]} for one in ask.tools]
    return {
        "id": f"resp_{answer.number}", "object": "response", "created_at": answer.created, "status": status,
        "error": None, "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": ask.messages[0].content if ask.instructions else None, "max_output_tokens": ask.max_tokens,
        "model": answer.model, "output": output, "parallel_tool_calls": True, "previous_response_id": ask.previous,
        "reasoning": {"effort": None, "summary": None}, "store": True, "temperature": None, "top_p": None,
        "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": tools, "truncation": "disabled",
        "usage": _usage(answer) if isinstance(answer, Answer) else None, "user": None, "metadata": {},
    }  # fmt: skip


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens, "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": answer.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }  # fmt: skip


def _message(answer: Started) -> dict[str, Any]:
    return {"id": f"msg_{answer.number}", "type": "message", "status": "in_progress", "role": "assistant",
            "content": []}  # fmt: skip


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _output(answer: Answer) -> list[dict[str, Any]]:
    status = "incomplete" if answer.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if answer.reply.content:
        items.append({**_message(answer), "status": status, "content": [_part(answer.reply.content)]})
    for number, call in enumerate(answer.reply.tool_calls):
        if call.error is None:
            items.append({"id": f"fc_{answer.number}_{number}", "type": "function_call", "status": "completed",
                          "call_id": call.id, "name": call.name,
                          "arguments": msgspec.json.encode(call.arguments).decode()})  # fmt: skip
    return items


def _items(given: Any) -> list[Message]:
    """The conversation: what one answer of ours consisted of stands there as several items, and becomes one again."""
    if given is None:
        return []
    if isinstance(given, str):
        return [Message("user", given)]
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise invalid("input is neither a text nor a list of items", "input")
    messages: list[Message] = []
    said, calls = "", list[ToolCall]()
    open_turn = False

    def close() -> None:
        nonlocal said, open_turn
        if open_turn:
            messages.append(Message("assistant", said, tuple(calls)))
            said, open_turn = "", False
            calls.clear()

    for number, item in enumerate(given):
        where, kind = f"input[{number}]", item.get("type", "message")
        if kind == "function_call":
            open_turn = True
            calls.append(call_of(str(item.get("name")), item.get("arguments"), str(item.get("call_id"))))
        elif kind == "message" and item.get("role") == "assistant":
            if calls or said:
                close()
            open_turn, said = True, text_of(item.get("content"), f"{where}.content", _TEXTS)
        elif kind == "function_call_output":
            close()
            text = text_of(item.get("output"), f"{where}.output", _TEXTS)
            messages.append(Message("tool", text, tool_call_id=str(item.get("call_id"))))
        elif kind == "message" and item.get("role") in ("user", "system", "developer"):
            close()
            role = "user" if item["role"] == "user" else "system"
            messages.append(Message(role, text_of(item.get("content"), f"{where}.content", _TEXTS)))  # type: ignore[arg-type]
        elif kind not in _IGNORED:
            raise invalid(f"{where} is of type {kind!r}, role {item.get('role')!r}; this gateway knows messages, "
                          "function calls and their outputs", where)  # fmt: skip
    close()
    return messages


def _tool(tool: _Tool, number: int) -> dict[str, Any]:
    if tool.type != "function" or not tool.name:
        raise invalid(f"tools[{number}] is of type {tool.type!r}; this gateway knows functions alone", "tools")
    return function(tool.name, tool.description, tool.parameters)
