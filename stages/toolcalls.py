"""Reads the tool calls out of a sampled assistant text: one parser for each format that models write."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

import msgspec

from stages.trajectory import ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SHOWN_CHARS = 80
"""How much of a malformed call its error quotes."""
MAX_CALLS: Final = 64
"""Calls of one message that are read, which bounds what reading costs; all beyond them are one malformed call."""
_SPACE: Final = re.compile(r"\s*")
_decoder: Final = json.JSONDecoder()
_INTEGERS: Final = range(-(1 << 63), 1 << 64)


def parse_hermes(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Split `text` into its content and its calls, `<tool_call>{"name":..,"arguments":{..}}</tool_call>` each.

    The format is the one of Nous Research's Hermes models, which Qwen kept. A call that cannot be read is a `ToolCall`
    with `error` set, and its text stays in the content: rendering the message again then gives what the model wrote.
    """
    calls: list[ToolCall] = []
    kept: list[str] = []
    position = 0
    while (start := text.find(_OPEN, position)) >= 0:
        if len(calls) == MAX_CALLS:
            calls.append(too_many())
            break
        body, end, closed = _extent(text, start + len(_OPEN))
        call = _hermes_call(body, closed=closed, index=len(calls))
        calls.append(call)
        kept.append(text[position : end if call.error else start])
        position = end
    if not calls:
        return text, ()
    kept.append(text[position:])
    return "".join(kept).strip(), tuple(calls)


def _extent(text: str, start: int) -> tuple[str, int, bool]:
    """Body of the call that begins at `start`, where the text goes on, and whether it was closed.

    A well-formed body ends where its JSON ends, as a string in it may hold the tags themselves (an agent that works on
    chat code writes such commands). Any other ends at the next tag; where no closing one is left, at the text's end.
    """
    close = text.find(_CLOSE, start)
    if close < 0:
        return text[start:], len(text), False
    begin = _after_space(text, start)
    try:
        _, json_end = _decoder.raw_decode(text, begin)
    except (ValueError, RecursionError):
        json_end = begin
    rest = _after_space(text, json_end)
    if json_end > begin and text.startswith(_CLOSE, rest):
        return text[start:json_end], rest + len(_CLOSE), True
    reopen = text.find(_OPEN, start, close)
    if reopen < 0:
        return text[start:close], close + len(_CLOSE), True
    return text[start:reopen], reopen, False


def _after_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found is not None else start


def too_many() -> ToolCall:
    """What stands for all calls beyond MAX_CALLS."""
    reason = f"malformed tool call: a message may hold {MAX_CALLS} calls, the others are not read"
    return ToolCall(name="", id=f"call_{MAX_CALLS}", error=reason)


def unusable(arguments: Any) -> str | None:
    """Why arguments cannot be used, or None: they are kept in rows, which know JSON's values in 64 bits."""
    found: list[Any] = [arguments]
    while found:
        value = found.pop()
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                return "an argument has keys that are no text"
            found += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            found += value
        elif isinstance(value, int):
            if value not in _INTEGERS:
                return "an argument has an integer of more than 64 bits"
        elif isinstance(value, float):
            if not math.isfinite(value):
                return "an argument is no finite number"
        elif not isinstance(value, str) and value is not None:
            return f"an argument is no literal that JSON knows ({type(value).__name__})"
    try:
        msgspec.json.encode(arguments)
        msgspec.msgpack.encode(arguments)
    except (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        return f"an argument cannot be kept ({type(error).__name__})"
    return None


def _hermes_call(body: str, *, closed: bool, index: int) -> ToolCall:
    """Read the JSON between the tags; the error is a sentence for the model, who can write the call anew."""
    call_id = f"call_{index}"

    def malformed(reason: str, name: str = "") -> ToolCall:
        quoted = body.strip()
        quoted = quoted if len(quoted) <= _SHOWN_CHARS else quoted[:_SHOWN_CHARS] + "..."
        return ToolCall(name=name, id=call_id, error=f"malformed tool call: {reason}; got {quoted!r}")

    if not closed:
        return malformed("it has no </tool_call>")
    try:
        value: Any = msgspec.json.decode(body.strip())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        return malformed(f"not JSON ({error})")
    if not isinstance(value, dict):
        return malformed("not a JSON object")
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        return malformed('"name" must be a non-empty string')
    if isinstance(arguments, str):
        # Some models write the arguments as a string that holds the JSON object, as OpenAI's wire format does.
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return malformed('"arguments" is a string that holds no JSON', name)
    if not isinstance(arguments, dict):
        return malformed('"arguments" must be a JSON object', name)
    if (reason := unusable(arguments)) is not None:
        return malformed(reason, name)
    return ToolCall(name=name, arguments=arguments, id=call_id)
