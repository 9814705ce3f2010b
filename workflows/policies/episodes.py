"""Plays task=arith without a sandbox: the expert's episodes as tokens, and the world's answer to a sampled turn."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from stages.chat import ChatTokenizer, parse_tool_calls
from stages.trajectory import Message, ToolCall
from workflows.tasks import sums
from workflows.tools import bash

TOOLS = (bash.SCHEMA,)
_ECHO = re.compile(r"echo \$\(\(([0-9+*-]+)\)\)")
_TIMEOUT_S = 30.0


def shell(command: str, files: Mapping[str, str]) -> tuple[str, int]:
    """Output and exit code of `command` as bash would give them, for the two commands that the expert uses.

    Everything else counts as a failed command: a sampled text is never run on the machine that trains.
    """
    if command == f"cat {sums.NUMBERS}":
        content = files.get(sums.NUMBERS_PATH)
        return (content, 0) if content is not None else (f"cat: {sums.NUMBERS}: No such file or directory\n", 1)
    match = _ECHO.fullmatch(command)
    # A leading zero is octal to bash, and ** a power: the expert writes neither.
    if match and not re.search(r"(?<![0-9])0[0-9]|\*\*", match.group(1)):
        with contextlib.suppress(ValueError):
            return f"{sums.value_of(match.group(1))}\n", 0
    return "bash: syntax error\n", 2


def tool_text(call: ToolCall, files: Mapping[str, str]) -> str:
    """What the agent's loop answers to one call."""
    if call.error is not None:
        return call.error
    if call.name != bash.NAME:
        return f"error: no tool is called {call.name!r}; the tools are: {bash.NAME}"
    wrong = bash.wrong_arguments(call.arguments)
    if wrong:
        return wrong
    output, exit_code = shell(call.arguments["command"], files)
    result: Any = SimpleNamespace(output=output, exit_code=exit_code, truncated=False, timed_out=False, restarted=False)
    return bash.observation(result, _TIMEOUT_S)


def expert_turns(row: Mapping[str, Any]) -> list[Message]:
    """The assistant messages that solve a row: read the file where there is one, do the sum, say the answer."""
    numbers = row.get("files", {}).get(sums.NUMBERS_PATH, "")
    commands = [f"cat {sums.NUMBERS}"] if numbers else []
    commands.append(f"echo $(({sums.expression_of(row['question'], numbers)}))")
    turns = [Message("assistant", tool_calls=(ToolCall(bash.NAME, {"command": text}),)) for text in commands]
    return [*turns, Message("assistant", sums.answer_text(row["answer"]))]


@dataclass
class Play:
    """One conversation in progress, its stream built exactly as a rollout's is: prompt, turn, bridge, turn, ..."""

    chat: ChatTokenizer
    row: Mapping[str, Any]
    messages: list[Message] = field(default_factory=list)
    turns: int = 0

    def start(self) -> list[int]:
        """Token ids of the prompt."""
        self.messages = sums.prompt_of(self.row)
        return self.chat.encode(self.chat.render(self.messages, TOOLS))

    def reply(self, sampled: Sequence[int], max_turns: int) -> list[int] | None:
        """Token ids that follow a finished turn, or None where the episode ends with it."""
        content, calls = parse_tool_calls(self.chat.decode([i for i in sampled if i not in self.chat.eos_ids]))
        return self.follow(Message("assistant", content, calls), max_turns)

    def follow(self, message: Message, max_turns: int) -> list[int] | None:
        """The same, for a message that is given and not sampled."""
        self.turns += 1
        self.messages.append(message)
        if not message.tool_calls or self.turns >= max_turns:
            return None
        files = self.row.get("files", {})
        results = [Message("tool", tool_text(call, files), tool_call_id=call.id) for call in message.tool_calls]
        text = self.chat.bridge(self.messages, results, TOOLS, ended=True)
        self.messages += results
        return self.chat.encode(text) if text is not None else None

    @property
    def solved(self) -> bool:
        """Whether the last message says the answer."""
        return self.messages[-1].content.strip() == sums.answer_text(self.row["answer"])


def expert_tokens(chat: ChatTokenizer, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """The stream of the expert's episode and its mask: 1 on what the assistant says, its end of turn included."""
    play = Play(chat, row)
    ids = play.start()
    mask = [0] * len(ids)
    for turn in expert_turns(row):
        said = _turn_tokens(chat, play.messages, turn)
        after = play.follow(turn, max_turns=16) or []
        ids += said + after
        mask += [1] * len(said) + [0] * len(after)
    return ids, mask


def _turn_tokens(chat: ChatTokenizer, before: Sequence[Message], turn: Message) -> list[int]:
    """What the model has to sample so that the template's rendering of `turn` stands in the stream."""
    prompt = chat.render(before, TOOLS)
    text = chat.render([*before, turn], TOOLS, add_generation_prompt=False)[len(prompt) :]
    end = text.removesuffix(chat.turn_tail)
    eos = next(iter(chat.eos_ids))
    return [*chat.encode(end), eos]
