"""OpenAI's chat completions and completions: requests read, answers and streams written. Pure."""

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
from stages.trajectory import Message

_TYPES: Final = {
    "invalid_request": "invalid_request_error", "authentication": "invalid_request_error",
    "permission": "invalid_request_error", "not_found": "invalid_request_error",
    "too_large": "invalid_request_error", "overloaded": "server_error", "server": "server_error",
    "rate_limit": "rate_limit_error",
}  # fmt: skip
_CODES: Final = {
    "authentication": "invalid_api_key", "not_found": "unknown_url", "rate_limit": "rate_limit_exceeded",
}  # fmt: skip
_FINISH: Final = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "stop_string": "stop"}
DONE: Final = b"data: [DONE]\n\n"


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: Any = None
    arguments: Any = ""


class _Tool(msgspec.Struct):
    type: str = "function"
    function: _Function | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""
    type: str = "function"


class _Said(msgspec.Struct):
    role: str
    content: Any = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Chat(msgspec.Struct):
    messages: list[_Said]
    model: str = ""
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: Any = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None
    functions: Any = None
    audio: Any = None


class _Completion(msgspec.Struct):
    prompt: Any
    model: str = ""
    max_tokens: int | None = None
    stop: Any = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class OpenAIErrors:
    """What OpenAI's routes share: how an error looks, and an event that says nothing."""

    ping: bytes = b": ping\n\n"

    def error(self, refused: RefusedError) -> bytes:
        """See Dialect."""
        code = refused.code or _CODES.get(refused.kind)
        value = {"message": str(refused), "type": _TYPES[refused.kind], "param": refused.param, "code": code}
        return msgspec.json.encode({"error": value})

    def error_event(self, refused: RefusedError) -> bytes:
        """See Dialect."""
        return b"data: " + self.error(refused) + b"\n\n"


class ChatCompletions(OpenAIErrors):
    """POST /v1/chat/completions."""

    history: str | None = "messages"

    def read(self, body: bytes) -> Ask:
        """See Dialect."""
        given = decoded(body, _Chat)
        form = (given.response_format or {}).get("type")
        refuse_fields(
            {"n": given.n not in (None, 1), "logprobs": given.logprobs, "functions": given.functions,
             "audio": given.audio, "response_format": form not in (None, "text")}
        )  # fmt: skip
        if given.tool_choice not in (None, "auto", "none"):
            refuse_fields({"tool_choice": given.tool_choice}, "nothing can make the policy call a tool")
        most = positive(given.max_completion_tokens, "max_completion_tokens") or positive(
            given.max_tokens, "max_tokens"
        )
        return Ask(
            model=given.model, messages=tuple(_message(one, n) for n, one in enumerate(given.messages)),
            tools=tuple(_tool(one, n) for n, one in enumerate(given.tools or [])),
            parse=bool(given.tools) and given.tool_choice != "none", max_tokens=most, stop=stops(given.stop),
            stream=bool(given.stream), usage=bool(given.stream_options and given.stream_options.include_usage),
        )  # fmt: skip

    def write(self, ask: Ask, answer: Answer) -> bytes:
        """See Dialect."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.reply.content or None, "refusal": None}
        if calls := _calls(answer.reply):
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _FINISH[answer.finish]}
        head = _head(answer, "chat.completion", "chatcmpl")
        return msgspec.json.encode({**head, "choices": [choice], "usage": usage(answer)})

    def teller(self, ask: Ask) -> Teller:
        """See Dialect."""
        return _ChatTeller(ask)


class Completions(OpenAIErrors):
    """POST /v1/completions."""

    history: str | None = None

    def read(self, body: bytes) -> Ask:
        """See Dialect."""
        given = decoded(body, _Completion)
        refuse_fields(
            {"n": given.n not in (None, 1), "best_of": given.best_of not in (None, 1), "logprobs": given.logprobs,
             "echo": given.echo, "suffix": given.suffix}
        )  # fmt: skip
        prompt = given.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list) and all(type(one) is int for one in prompt):
            prompt = tuple(prompt)
        if not isinstance(prompt, str | tuple) or not prompt:
            raise invalid("prompt must be one text or one list of token ids, and not empty", "prompt")
        return Ask(
            model=given.model, prompt=prompt, max_tokens=positive(given.max_tokens, "max_tokens"),
            stop=stops(given.stop), stream=bool(given.stream), parse=False,
            usage=bool(given.stream_options and given.stream_options.include_usage),
        )  # fmt: skip

    def write(self, ask: Ask, answer: Answer) -> bytes:
        """See Dialect."""
        choice = {"index": 0, "text": answer.reply.content, "logprobs": None, "finish_reason": _FINISH[answer.finish]}
        head = _head(answer, "text_completion", "cmpl")
        return msgspec.json.encode({**head, "choices": [choice], "usage": usage(answer)})

    def teller(self, ask: Ask) -> Teller:
        """See Dialect."""
        return _CompletionTeller(ask)


class _ChatTeller:
    """See Teller."""

    def __init__(self, ask: Ask) -> None:
        self._usage = ask.usage
        self._head: dict[str, Any] = {}

    def begin(self, started: Started) -> Iterator[bytes]:
        """See Teller."""
        self._head = _head(started, "chat.completion.chunk", "chatcmpl")
        yield self._chunk({"role": "assistant", "content": ""})

    def text(self, text: str) -> Iterator[bytes]:
        """See Teller."""
        yield self._chunk({"content": text})

    def end(self, answer: Answer) -> Iterator[bytes]:
        """See Teller."""
        for index, call in enumerate(_calls(answer.reply)):
            arguments = call["function"].pop("arguments")
            call["function"]["arguments"] = ""
            yield self._chunk({"tool_calls": [{"index": index, **call}]})
            for piece in pieces(arguments):
                yield self._chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        yield self._chunk({}, _FINISH[answer.finish])
        if self._usage:
            yield data({**self._head, "choices": [], "usage": usage(answer)})
        yield DONE

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return data({**self._head, "choices": [choice], **({"usage": None} if self._usage else {})})


class _CompletionTeller:
    """See Teller."""

    def __init__(self, ask: Ask) -> None:
        self._usage = ask.usage
        self._head: dict[str, Any] = {}

    def begin(self, started: Started) -> Iterator[bytes]:
        """See Teller; nothing comes before the text here."""
        self._head = _head(started, "text_completion", "cmpl")
        return iter(())

    def text(self, text: str) -> Iterator[bytes]:
        """See Teller."""
        yield self._chunk(text)

    def end(self, answer: Answer) -> Iterator[bytes]:
        """See Teller."""
        yield self._chunk("", _FINISH[answer.finish])
        if self._usage:
            yield data({**self._head, "choices": [], "usage": usage(answer)})
        yield DONE

    def _chunk(self, text: str, finish: str | None = None) -> bytes:
        return data({**self._head, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}]})


def usage(answer: Answer) -> dict[str, Any]:
    """The usage of both."""
    return {
        "prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }  # fmt: skip


def _head(answer: Started, kind: str, prefix: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{answer.number}", "object": kind, "created": answer.created, "model": answer.model}


def _calls(reply: Message) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function",
         "function": {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()}}
        for call in reply.tool_calls if call.error is None
    ]  # fmt: skip


def _message(said: _Said, number: int) -> Message:
    where = f"messages[{number}]"
    content = text_of(said.content, f"{where}.content")
    match said.role:
        case "system" | "developer":
            return Message("system", content)
        case "user":
            return Message("user", content)
        case "assistant":
            calls = [call_of(one.function.name, one.function.arguments, one.id) for one in said.tool_calls or []]
            return Message("assistant", content, tuple(calls))
        case "tool":
            return Message("tool", content, tool_call_id=said.tool_call_id)
    raise invalid(f"{where}.role is {said.role!r}; it may be system, developer, user, assistant or tool", where)


def _tool(tool: _Tool, number: int) -> dict[str, Any]:
    if tool.type != "function" or tool.function is None:
        raise invalid(f"tools[{number}] is of type {tool.type!r}; this gateway knows functions alone", "tools")
    return function(tool.function.name, tool.function.description, tool.function.parameters)
