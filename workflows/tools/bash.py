"""The bash tool: its schema, its call in a sandbox, and the text that the agent reads of the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workflows.tools import arguments

if TYPE_CHECKING:
    from sandbox.protocols import CommandResult, Sandbox

NAME = "bash"

SCHEMA = arguments.schema(NAME, "Run a command.", {"command": {"type": "string"}}, ["command"])


async def call(sandbox: Sandbox, given: Mapping[str, Any], timeout_s: float) -> str:
    """Run `given["command"]` in the sandbox's persistent shell and return what the agent reads.

    Wrong arguments come back as text too: the policy that wrote them can mend them.
    """
    wrong = wrong_arguments(given)
    if wrong:
        return wrong
    result = await sandbox.shell.run(given["command"], timeout_s=timeout_s)
    return observation(result, timeout_s)


def wrong_arguments(given: Mapping[str, Any]) -> str | None:
    """What is wrong with a call's arguments, as a sentence for the agent, or None."""
    return arguments.wrong_arguments(SCHEMA, given)


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
