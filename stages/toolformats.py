"""The formats in which models write tool calls, and which of them a chat template teaches.

- `hermes`: `<tool_call>{"name":..,"arguments":{..}}</tool_call>`, see `toolcalls`.
- `xml`: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>..</function></tool_call>` (Qwen3-Coder). A value is
  text; one that reads as JSON of another kind than text is taken for that.
- `python`: the whole answer is a list of calls, `[name(key=value, ...), ...]`, of literals alone (Llama's own form).

Thinking before a call stays in the content, as it was sampled. A call that cannot be read is a `ToolCall` with `error`
set and its text stays in the content, so that the agent can tell the model and the stream stays what was sampled.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

from stages.toolcalls import MAX_CALLS, parse_hermes, too_many, unusable
from stages.trajectory import ToolCall

ToolFormat = Literal["hermes", "xml", "python"]
Parsed = tuple[str, tuple[ToolCall, ...]]

_SHOWN_CHARS: Final = 80
_CALL: Final = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION: Final = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*\Z", re.DOTALL)
_PARAMETER: Final = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)
_THINKING: Final = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_LIST_OF_CALLS: Final = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")


def format_of(template: str) -> ToolFormat:
    """The format that a chat template tells the model to write."""
    if "<function=" in template:
        return "xml"
    if "<|python_start|>" in template or re.search(r"\[\s*func_name\d?\(", template):
        return "python"
    return "hermes"


def parse_calls(text: str, form: ToolFormat) -> Parsed:
    """Content and calls of a sampled text; see the module's head."""
    return _PARSERS[form](text)


def _quoted(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "...")


def _malformed(index: int, reason: str, text: str, name: str = "") -> ToolCall:
    return ToolCall(name, id=f"call_{index}", error=f"malformed tool call: {reason}; got {_quoted(text)}")


def parse_xml(text: str) -> Parsed:
    """See the module's head."""
    calls: list[ToolCall] = []
    kept: list[str] = []
    position = 0
    for found in _CALL.finditer(text):
        if len(calls) == MAX_CALLS:
            calls.append(too_many())
            break
        call = _xml_call(found[1], len(calls), closed=bool(found[2]))
        calls.append(call)
        kept.append(text[position : found.end() if call.error else found.start()])
        position = found.end()
    if not calls:
        return text, ()
    return "".join([*kept, text[position:]]).strip(), tuple(calls)


def _xml_call(body: str, index: int, *, closed: bool) -> ToolCall:
    if not closed:
        return _malformed(index, "it has no </tool_call>", body)
    function = _FUNCTION.match(body)
    if function is None:
        return _malformed(index, "not one <function=NAME>...</function>", body)
    arguments: dict[str, Any] = {}
    position, inner = 0, function[2].rstrip()
    while position < len(inner):
        parameter = _PARAMETER.match(inner, position)
        if parameter is None:
            return _malformed(index, "between its parameters stands other text", inner[position:], function[1])
        if parameter[1] in arguments:
            return _malformed(index, f"parameter {parameter[1]} stands there twice", body, function[1])
        arguments[parameter[1]] = _value(parameter[2])
        position = parameter.end()
    if (reason := unusable(arguments)) is not None:
        return _malformed(index, reason, body, function[1])
    return ToolCall(function[1], arguments, f"call_{index}")


def _value(text: str) -> Any:
    try:
        value = msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def parse_python(text: str) -> Parsed:
    """See the module's head."""
    thinking = _THINKING.match(text)
    body = text[thinking.end() :] if thinking else text
    source = body.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if not _LIST_OF_CALLS.match(source):
        return text, ()
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return text, (_malformed(0, f"no Python list of calls ({type(error).__name__})", source),)
    if not isinstance(tree, ast.List):
        return text, (_malformed(0, "no list of calls", source),)
    calls = tuple(_python_call(node, index, source) for index, node in enumerate(tree.elts[:MAX_CALLS]))
    if len(tree.elts) > MAX_CALLS:
        return text, (*calls, too_many())
    if any(call.error for call in calls):
        return text, calls
    return (thinking[0] if thinking else "").strip(), calls


def _python_call(node: ast.expr, index: int, source: str) -> ToolCall:
    if not isinstance(node, ast.Call):
        return _malformed(index, "the list holds something else than calls", source)
    try:
        name = ast.unparse(node.func)
    except RecursionError:
        return _malformed(index, "its name is nested too deep", source)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return _malformed(index, "arguments need names", source, name)
    try:
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        return _malformed(index, f"an argument is no literal that JSON knows ({error})", source, name)
    if len(arguments) < len(node.keywords):
        return _malformed(index, "an argument stands there twice", source, name)
    if (reason := unusable(arguments)) is not None:
        return _malformed(index, reason, source, name)
    return ToolCall(name, arguments, f"call_{index}")


_PARSERS: Final[dict[ToolFormat, Callable[[str], Parsed]]] = {
    "hermes": parse_hermes,
    "xml": parse_xml,
    "python": parse_python,
}
