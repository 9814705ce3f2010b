"""What every tool shares: its schema in OpenAI's form, and what is wrong with a call's arguments, said to the agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS: dict[str, tuple[type, str]] = {
    "string": (str, "a string"),
    "integer": (int, "a whole number"),
    "array": (list, "a list"),
}


def schema(name: str, description: str, properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    """OpenAI's function format; keep it short, because every token of it stands in every prompt."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": dict(properties), "required": required},
        },
    }


def wrong_arguments(tool: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with a call's arguments, by the tool's schema, as a sentence for the agent; None where nothing is.

    A required string may not be empty, and none may hold a NUL byte.
    """
    function = tool["function"]
    name, properties, required = (
        function["name"], function["parameters"]["properties"], function["parameters"]["required"],
    )  # fmt: skip
    unknown = sorted(set(arguments) - set(properties))
    if unknown:
        takes = "one argument" if len(properties) == 1 else "the arguments"
        return f"error: {name} takes {takes}, {', '.join(properties)}; got {', '.join(unknown)}"
    for key, wanted in properties.items():
        value = arguments.get(key)
        if value is None and key not in required:
            continue
        kind, said = _KINDS[wanted["type"]]
        if not isinstance(value, kind) or isinstance(value, bool):
            got = "nothing" if value is None else type(value).__name__
            return f"error: {name} needs {key}, {said}; got {got}"
        if isinstance(value, str):
            if key in required and not value.strip():
                return f"error: {key} is empty"
            if "\x00" in value:
                return f"error: {key} holds a NUL byte"
        if "enum" in wanted and value not in wanted["enum"]:
            return f"error: {key} is one of {', '.join(wanted['enum'])}; got {value}"
    return None
