"""The tools that agents may be given, by the names that models know them by."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workflows.tools import bash, editor, patch, python

if TYPE_CHECKING:
    from sandbox.protocols import Sandbox


@dataclass(frozen=True)
class Tool:
    """One tool.

    Args:
        schema: in OpenAI's function format.
        call: does what a call asks for, within so many seconds, and gives what the agent reads.
    """

    schema: Mapping[str, Any]
    call: Callable[[Sandbox, Mapping[str, Any], float], Awaitable[str]]


TOOLS: Mapping[str, Tool] = {
    module.NAME: Tool(module.SCHEMA, module.call) for module in (bash, python, editor, patch)
}  # fmt: skip


def schemas(names: Sequence[str]) -> list[dict[str, Any]]:
    """The schemas of tools by their names.

    Raises:
        ValueError: no tool has that name; the message lists them.
    """
    for name in names:
        if name not in TOOLS:
            raise ValueError(f"no tool is called {name!r}; the tools are: {', '.join(TOOLS)} (agent.options.tools)")
    return [dict(TOOLS[name].schema) for name in names]
