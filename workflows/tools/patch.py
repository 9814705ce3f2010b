"""The patch tool: a unified diff, applied wholly or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sandbox.errors import FilesError
from workflows.tools import arguments
from workflows.tools.editor import mistake

if TYPE_CHECKING:
    from sandbox.protocols import Sandbox

NAME = "apply_patch"

SCHEMA = arguments.schema(
    NAME, "Apply a unified diff.",
    {"patch": {"type": "string"}, "directory": {"type": "string", "description": "Of its paths; else the shell's."}},
    ["patch"],
)  # fmt: skip


async def call(sandbox: Sandbox, given: Mapping[str, Any], timeout_s: float) -> str:
    """Apply `given["patch"]`, and return what the agent reads.

    Raises:
        SandboxError: the fault is not the agent's.
    """
    wrong = arguments.wrong_arguments(SCHEMA, given)
    if wrong:
        return wrong
    directory = given.get("directory") or (await sandbox.shell.run(":", timeout_s=timeout_s)).cwd
    try:
        changed = await sandbox.files.patch(given["patch"], directory=directory)
    except FilesError as error:
        return mistake(error)
    return "\n".join(f"{path} was changed." for path in changed)
