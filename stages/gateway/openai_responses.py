"""OpenAI's responses: requests read, answers and streams written. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from stages.gateway.asks import Answer, Ask, call_of, data, decoded, function, pieces, positive, refuse_fields, text_of
from stages.gateway.errors import invalid
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
        return msgspec.json.encode(_response(ask, answer, _output(answer), done=True))

    def events(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        """See Dialect."""
        number = 0

        def event(kind: str, **value: Any) -> bytes:
            nonlocal number
            number += 1
            return data({"type": kind, "sequence_number": number - 1, **value}, kind)

        begun = _response(ask, answer, [], done=False)
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        output = _output(answer)
        for index, item in enumerate(output):
            at: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
            if item["type"] == "message":
                part, text = item["content"][0], item["content"][0]["text"]
                at["content_index"] = 0
                opened = {**item, "status": "in_progress", "content": []}
                yield event("response.output_item.added", output_index=index, item=opened)
                yield event("response.content_part.added", **at, part={**part, "text": ""})
                for piece in pieces(text):
                    yield event("response.output_text.delta", **at, delta=piece, logprobs=[])
                yield event("response.output_text.done", **at, text=text, logprobs=[])
                yield event("response.content_part.done", **at, part=part)
            else:
                opened = {**item, "status": "in_progress", "arguments": ""}
                yield event("response.output_item.added", output_index=index, item=opened)
                for piece in pieces(item["arguments"]):
                    yield event("response.function_call_arguments.delta", **at, delta=piece)
                yield event(
                    "response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"]
                )
            yield event("response.output_item.done", output_index=index, item=item)
        ended = _response(ask, answer, output, done=True)
        yield event(f"response.{ended['status']}", response=ended)


def _response(ask: Ask, answer: Answer, output: list[dict[str, Any]], *, done: bool) -> dict[str, Any]:
    cut = answer.finish == "length"
    status = ("incomplete" if cut else "completed") if done else "in_progress"
    tools = [{"type": "function", "strict": False, "description": None, **one["function"]} for one in ask.tools]
    used = {
        "input_tokens": answer.prompt_tokens, "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": answer.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }  # fmt: skip
    return {
        "id": f"resp_{answer.number}", "object": "response", "created_at": answer.created, "status": status,
        "error": None, "incomplete_details": {"reason": "max_output_tokens"} if done and cut else None,
        "instructions": ask.messages[0].content if ask.instructions else None, "max_output_tokens": ask.max_tokens,
        "model": answer.model, "output": output, "parallel_tool_calls": True, "previous_response_id": ask.previous,
        "reasoning": {"effort": None, "summary": None}, "store": True, "temperature": None, "top_p": None,
        "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": tools, "truncation": "disabled",
        "usage": used if done else None, "user": None, "metadata": {},
    }  # fmt: skip


def _output(answer: Answer) -> list[dict[str, Any]]:
    status = "incomplete" if answer.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if answer.reply.content:
        part = {"type": "output_text", "text": answer.reply.content, "annotations": [], "logprobs": []}
        items.append({"id": f"msg_{answer.number}", "type": "message", "status": status, "role": "assistant",
                      "content": [part]})  # fmt: skip
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
