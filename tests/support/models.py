"""A Model that says what a script says, for agents and tasks without an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stages.chat import parse_tool_calls
from stages.trajectory import Chain, Message, Trajectory

Reply = str | Message | Callable[[Sequence[Message]], str]


class ScriptedModel:
    """Gives the replies in order; a text is read for tool calls as a sampled one is, a function sees the messages.

    `asked` holds the messages and tools of every call to generate, `messages` the transcript, `said` what say got.
    """

    def __init__(self, replies: Sequence[Reply] = ()) -> None:
        self._replies = list(replies)
        self.asked: list[tuple[list[Message], list[Mapping[str, Any]]]] = []
        self.said: list[tuple[list[Message], Message, list[Mapping[str, Any]]]] = []
        self.messages: list[Message] = []

    async def generate(self, *, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Message:
        self.asked.append((list(messages), list(tools)))
        if not self._replies:
            raise AssertionError(f"the script has no reply number {len(self.asked)}")
        reply = self._replies.pop(0)
        if not isinstance(reply, Message):
            text = reply if isinstance(reply, str) else reply(messages)
            content, calls = parse_tool_calls(text)
            reply = Message("assistant", content, calls, finish_reason="stop")
        self.messages = [*messages, reply]
        return reply

    def say(self, *, messages: Sequence[Message], reply: Message, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.said.append((list(messages), reply, list(tools)))
        self.messages = [*messages, reply]

    def trajectory(self) -> Trajectory:
        """The messages, with one empty chain: verifiers of text look at nothing else."""
        return Trajectory([Chain.of(0, (), (), ())], self.messages)
