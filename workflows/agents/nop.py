"""agent=nop: does nothing, which proves the verifier from the bad side."""

from __future__ import annotations

from sandbox.protocols import Sandbox
from stages.protocols import Limits, Model, Row, Task
from stages.trajectory import Message


class NopAgent:
    """Leaves the sandbox as it is and says an empty message.

    Args:
        task: gives prompt and tool schemas.
    """

    name = "nop"
    privileged = False

    def __init__(self, task: Task) -> None:
        self._task = task

    async def run(self, row: Row, model: Model, sandbox: Sandbox, limits: Limits) -> None:
        """Record the prompt and an empty reply."""
        model.say(messages=self._task.prompt(row), reply=Message("assistant"), tools=self._task.tools(row))
