"""Reads the tool calls out of a sampled assistant text: one parser for each format that models write."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from stages.trajectory import ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SHOWN_CHARS = 80
"""How much of a malformed call its error quotes."""


def parse_hermes(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Split `text` into its content and its calls, `<tool_call>{"name":..,"arguments":{..}}</tool_call>` each.

    The format is the one of Nous Research's Hermes models, which Qwen kept. A call that cannot be read is a `ToolCall`
    with `error` set, and its text stays in the content: rendering the message again then gives what the model wrote.
    """
    calls: list[ToolCall] = []
    kept: list[str] = []
    position = 0
    while (start := text.find(_OPEN, position)) >= 0:
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
    chat code writes such commands). Any other ends at the next tag.
    """
    begin = len(text) - len(text[start:].lstrip())
    try:
        _, json_end = json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError):
        json_end = begin
    rest = len(text) - len(text[json_end:].lstrip())
    if json_end > begin and text.startswith(_CLOSE, rest):
        return text[start:json_end], rest + len(_CLOSE), True
    close, reopen = text.find(_CLOSE, start), text.find(_OPEN, start)
    if close >= 0 and (reopen < 0 or close < reopen):
        return text[start:close], close + len(_CLOSE), True
    end = reopen if reopen >= 0 else len(text)
    return text[start:end], end, False


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
        except msgspec.DecodeError:
            return malformed('"arguments" is a string that holds no JSON', name)
    if not isinstance(arguments, dict):
        return malformed('"arguments" must be a JSON object', name)
    return ToolCall(name=name, arguments=arguments, id=call_id)
