"""agent=oracle: does the task its author's way, which proves the verifier from the good side."""

from __future__ import annotations

from sandbox.protocols import Sandbox
from stages.protocols import Limits, Model, Row, Task
from stages.trajectory import Message


class OracleAgent:
    """Runs `task.solve` in the sandbox and records what it says as an assistant message that nobody trains on.

    Args:
        task: gives prompt, tool schemas and the solution.
    """

    name = "oracle"
    privileged = True

    def __init__(self, task: Task) -> None:
        self._task = task

    async def run(self, row: Row, model: Model, sandbox: Sandbox, limits: Limits) -> None:
        """Solve one row. A task whose solution lies in the files alone says an empty message."""
        answer = await self._task.solve(sandbox, row)
        reply = Message("assistant", answer or "")
        model.say(messages=self._task.prompt(row), reply=reply, tools=self._task.tools(row))
