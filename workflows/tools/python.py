"""The Python tool: its schema, its call in a sandbox, and the text that the agent reads of the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sandbox.errors import PythonUnavailable
from workflows.tools import arguments

if TYPE_CHECKING:
    from sandbox.protocols import CellResult, Sandbox

NAME = "python"

SCHEMA = arguments.schema(NAME, "Run Python; variables stay.", {"code": {"type": "string"}}, ["code"])


async def call(sandbox: Sandbox, given: Mapping[str, Any], timeout_s: float) -> str:
    """Run `given["code"]` in the sandbox's persistent Python and return what the agent reads.

    Wrong arguments come back as text too: the policy that wrote them can mend them. So does a kernel that cannot be
    started: an agent may have broken its own Python, and that must not end its rollout as a fault of ours.
    """
    wrong = wrong_arguments(given)
    if wrong:
        return wrong
    try:
        result = await sandbox.python.run(given["code"], timeout_s=timeout_s)
    except PythonUnavailable as error:
        return f"error: {error}"
    return observation(result, timeout_s)


def wrong_arguments(given: Mapping[str, Any]) -> str | None:
    """What is wrong with a call's arguments, as a sentence for the agent, or None."""
    return arguments.wrong_arguments(SCHEMA, given)


def observation(result: CellResult, timeout_s: float) -> str:
    """The cell's text and error, and a line in brackets for everything out of the ordinary."""
    lines = [part.removesuffix("\n") for part in (result.text, result.error or "") if part]
    if result.truncated:
        lines.append("[output was too long: its middle is left out]")
    if result.images:
        count = len(result.images)
        lines.append("[an image was shown]" if count == 1 else f"[{count} images were shown]")
    if result.timed_out:
        lines.append(f"[stopped after {timeout_s:g} s: the cell did not end in time]")
    if result.restarted:
        lines.append("[the kernel was started anew: variables and imports of earlier cells are gone, files are kept]")
    return "\n".join(lines)
