"""What every dialect's request and answer come down to: one record for each, and the Protocol of a dialect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from stages.gateway.errors import RefusedError, invalid
from stages.gateway.live import Started
from stages.toolcalls import unusable
from stages.trajectory import Message, ToolCall
from stages.wire import UNREADABLE

T = TypeVar("T")
Finish = Literal["stop", "length", "tool_calls", "stop_string"]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request. Temperature, top_p, penalties and seed of a client are not in it: the run's sampling params decide.

    Args:
        model: as the client named it; it is said back.
        messages: the conversation; empty where `prompt` is given.
        instructions: how many of them, from the first, stand beside the history in the request.
        tools: in OpenAI's function format.
        parse: calls are read out of what is sampled.
        prompt: of a completion without a chat: text or token ids.
        previous: id of the answer that it goes on from (Responses API).
        max_tokens: of the answer; None: the run's.
        stop: texts that end the answer.
        stream: as server-sent events.
        usage: the stream ends with the usage.
        count: only the prompt's tokens are wanted.
    """

    model: str = ""
    messages: tuple[Message, ...] = ()
    instructions: int = 0
    tools: tuple[dict[str, Any], ...] = ()
    parse: bool = True
    prompt: str | tuple[int, ...] | None = None
    previous: str | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    count: bool = False


class Answer(Started, frozen=True, kw_only=True):
    """An answer.

    Args:
        reply: content and calls.
        finish: `stop_string` where one of `Ask.stop` ended it; `stopped_by` is that text.
        completion_tokens: sampled.
        cached_tokens: of the prompt, that the engine had.
    """

    reply: Message
    finish: Finish
    completion_tokens: int
    cached_tokens: int = 0
    stopped_by: str | None = None


class Teller(Protocol):
    """Writes one stream of server-sent events: `begin`, `text` as often as there is more, `end`."""

    def begin(self, started: Started) -> Iterator[bytes]:
        """What comes before the first text."""
        ...

    def text(self, text: str) -> Iterator[bytes]:
        """More of the content."""
        ...

    def end(self, answer: Answer) -> Iterator[bytes]:
        """All that follows the content: calls, how it ended, usage."""
        ...


class Dialect(Protocol):
    """One API: how its requests are read, and its answers, errors and streams written. Pure."""

    @property
    def history(self) -> str | None:
        """The field of a request that is its list of messages, where it has one."""
        ...

    @property
    def ping(self) -> bytes:
        """An event of a stream that says nothing."""
        ...

    def read(self, body: bytes) -> Ask:
        """A request's body.

        Raises:
            RefusedError: it is wrong, or asks for what the gateway does not do.
        """
        ...

    def write(self, ask: Ask, answer: Answer) -> bytes:
        """The answer's body."""
        ...

    def teller(self, ask: Ask) -> Teller:
        """Writes an answer as a stream."""
        ...

    def error(self, refused: RefusedError) -> bytes:
        """The body of an error."""
        ...

    def error_event(self, refused: RefusedError) -> bytes:
        """An error amid a stream."""
        ...


def decoded(body: bytes, kind: type[T]) -> T:
    """The body as one of msgspec's types.

    Raises:
        RefusedError: it is no JSON, or a field is of another type; the message names it.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$")
        raise invalid(f"{said} (at {path.rstrip('`').lstrip('.') or 'the body'})", path.rstrip("`").lstrip(".") or None) from error  # fmt: skip # noqa: E501
    except UNREADABLE as error:
        raise invalid(f"the body is not valid JSON: {error}") from error


def text_of(content: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of a content: a string, nothing, or parts of which all are text.

    Raises:
        RefusedError: a part is something else; it is named.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where} is neither a text nor a list of parts", where)
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type", "text") in kinds and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise invalid(f"{where}: a part of type {kind!r}; this gateway takes text alone", where)
    return "".join(texts)


def call_of(name: str, arguments: Any, call_id: str) -> ToolCall:
    """A call that a client says back; arguments that cannot be read make it one that no record equals."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            value = None
    if not isinstance(value, dict) or unusable(value) is not None:
        return ToolCall(name, {}, call_id, error=f"the arguments are no JSON object: {str(arguments)[:80]!r}")
    return ToolCall(name, value, call_id)


def function(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool's schema in OpenAI's function format, which chat templates read."""
    value: dict[str, Any] = {"name": name}
    if description is not None:
        value["description"] = description
    value["parameters"] = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": value}


def pieces(text: str, size: int = 64) -> Iterator[str]:
    """A text as the deltas of a stream."""
    for start in range(0, len(text), size):
        yield text[start : start + size]


def data(value: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"


def refuse_fields(given: Mapping[str, Any], why: str = "this gateway does not do that") -> None:
    """Refuse fields that ask for something; `given` maps a field's name to what was asked, None and False for nothing.

    Raises:
        RefusedError: the first such field.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            raise invalid(f"{name} is not supported: {why}", name, "unsupported_parameter")


def stops(value: Any, name: str = "stop") -> tuple[str, ...]:
    """Stop texts, given as one, several or none.

    Raises:
        RefusedError: something else.
    """
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise invalid(f"{name} is neither a text nor a list of texts", name)
    return tuple(one for one in found if one)


def positive(value: int | None, name: str) -> int | None:
    """A bound of tokens.

    Raises:
        RefusedError: it is below 1.
    """
    if value is not None and value < 1:
        raise invalid(f"{name} must be at least 1, got {value}", name)
    return value
