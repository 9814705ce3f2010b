"""agent=tools: the native loop, in which the policy calls tools until it answers without a call."""

from __future__ import annotations

from collections.abc import Sequence

from sandbox.protocols import Sandbox
from stages.errors import PolicyTimeoutError
from stages.protocols import Limits, Model, Row, Task
from stages.trajectory import Message, ToolCall
from workflows.tools.toolbox import TOOLS, schemas


class ToolsAgent:
    """Sends the task's prompt, runs what the policy calls, one call after the other, and ends at a reply without calls.

    Args:
        task: gives prompt and tool schemas.
        tools: names of tools to offer instead of the task's: bash, python, str_replace_editor, apply_patch.

    Raises:
        ValueError: no tool has that name.
    """

    name = "tools"
    privileged = False

    def __init__(self, task: Task, tools: Sequence[str] | None = None) -> None:
        self._task, self._tools = task, None if tools is None else schemas(tools)

    async def run(self, row: Row, model: Model, sandbox: Sandbox, limits: Limits) -> None:
        """Work on one row.

        Raises:
            PolicyTimeoutError: `limits.max_turns` replies all asked for tools.
            ContextLengthError: the stream is full.
            LLMError: the engine failed.
        """
        await self._go_on(row, model, sandbox, limits, list(self._task.prompt(row)))

    async def resume(
        self, row: Row, model: Model, sandbox: Sandbox, limits: Limits, messages: Sequence[Message]
    ) -> None:
        """Go on where another worker stopped; calls whose results were not all there yet are run again."""
        await self._go_on(row, model, sandbox, limits, list(messages))

    async def _go_on(self, row: Row, model: Model, sandbox: Sandbox, limits: Limits, messages: list[Message]) -> None:
        tools = self._task.tools(row) if self._tools is None else self._tools
        offered = {tool["function"]["name"] for tool in tools}
        spoken = messages[len(self._task.prompt(row)) :]
        turns = sum(message.role == "assistant" for message in spoken)
        reply = spoken[-1] if spoken and spoken[-1].role == "assistant" else None
        while True:
            if reply is not None:
                if not reply.tool_calls:
                    return
                for call in reply.tool_calls:
                    text = await _run_call(sandbox, call, offered, limits.turn_timeout_s)
                    messages.append(Message("tool", text, tool_call_id=call.id, name=call.name or None))
            if turns >= limits.max_turns:
                raise PolicyTimeoutError(
                    f"row {row['task_id']}: still calling tools after {limits.max_turns} turns (agent.max_turns)",
                    max_turns=limits.max_turns,
                )
            reply = await model.generate(messages=messages, tools=tools)
            messages.append(reply)
            turns += 1


async def _run_call(sandbox: Sandbox, call: ToolCall, offered: set[str], timeout_s: float) -> str:
    """What the policy reads of one call; its own mistakes come back as text, so that it can mend them."""
    if call.error is not None:
        return call.error
    tool = TOOLS.get(call.name) if call.name in offered else None
    if tool is None:
        return f"error: no tool is called {call.name!r}; the tools are: {', '.join(sorted(offered))}"
    return await tool.call(sandbox, call.arguments, timeout_s)
