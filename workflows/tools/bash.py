"""The bash tool: its schema, its call in a sandbox, and the text that the agent reads of the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox.protocols import CommandResult, Sandbox

NAME = "bash"

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
"""OpenAI's function format; short, because every token of it stands in every prompt."""


async def call(sandbox: Sandbox, arguments: Mapping[str, Any], timeout_s: float) -> str:
    """Run `arguments["command"]` in the sandbox's persistent shell and return what the agent reads.

    Wrong arguments come back as text too: the policy that wrote them can mend them.
    """
    wrong = wrong_arguments(arguments)
    if wrong:
        return wrong
    result = await sandbox.shell.run(arguments["command"], timeout_s=timeout_s)
    return observation(result, timeout_s)


def wrong_arguments(arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with a call's arguments, as a sentence for the agent, or None."""
    unknown = sorted(set(arguments) - {"command"})
    if unknown:
        return f"error: bash takes one argument, command; got {', '.join(unknown)}"
    command = arguments.get("command")
    if not isinstance(command, str):
        got = "nothing" if command is None else type(command).__name__
        return f"error: bash needs command, a string; got {got}"
    if not command.strip():
        return "error: command is empty"
    if "\x00" in command:
        return "error: command holds a NUL byte"
    return None


def observation(result: CommandResult, timeout_s: float) -> str:
    """The command's output without its last newline, and a line in brackets for everything out of the ordinary."""
    lines = []
    output = result.output.removesuffix("\n")
    if output:
        lines.append(output)
    if result.truncated:
        lines.append("[output was too long: its middle is left out]")
    if result.timed_out:
        lines.append(f"[stopped after {timeout_s:g} s: the command did not end in time]")
    elif result.exit_code != 0:
        lines.append(f"[exit code {result.exit_code}]")
    if result.restarted:
        lines.append("[the shell was restarted: variables, functions and background jobs are gone, files are kept]")
    return "\n".join(lines)
