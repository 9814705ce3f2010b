"""Which chain a request goes on from: histories that come again are matched to what was sampled, never encoded anew.

A client sends its whole history with every request. What of it was said here before is found in a chain, message by
message, and stands there as the engine's own ids; only what is new is rendered and appended. The request goes on from
the longest such history: at a chain's end the chain grows; at an earlier turn a new chain begins with those very ids.
A history that is known nowhere (compacted, rewritten, another agent's) is rendered and begins a chain. The tokens of a
new chain's prompt are nobody's sample: mask 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from stages.chat import ChatError, parse_tool_calls
from stages.gateway.asks import Answer, Ask, Finish
from stages.gateway.errors import invalid
from stages.gateway.live import Live, Started
from stages.gateway.stopping import Cut
from stages.model import StreamModel
from stages.stream import TokenStream
from stages.trajectory import Message, ToolCall

_KEPT_ANSWERS: Final = 4096
"""Answers that a request may name as the one that it goes on from."""
_LONG_CHARS: Final = 32 * 1024
"""Texts above it are encoded beside the event loop; one of that size takes up to 30 ms."""
_ENCODERS: Final = ThreadPoolExecutor(2, "encode")
"""Of their own, so that texts of hostile agents, which take seconds, keep no other thread of the worker."""


class Mark(msgspec.Struct, frozen=True):
    """The end of a turn: so many messages, so many ids, and whether the end-of-turn token was itself sampled."""

    messages: int
    ids: int
    ended: bool


class Conversation:
    """A chain, and the messages or the text that it stands for."""

    def __init__(self, stream: TokenStream, tools: Sequence[Mapping[str, Any]]) -> None:
        self.stream, self.tools = stream, list(tools)
        self.messages: list[Message] = []
        self.heard: tuple[Message, ...] = ()
        """The messages as the client said them in the last request that was answered."""
        self.text: str | None = None
        self.marks: list[Mark] = []
        self.busy = True

    def shared(self, messages: tuple[Message, ...]) -> int:
        """How many messages from the first are the same; those of the last request are the same objects as a rule."""
        count = len(self.heard)
        if messages[:count] != self.heard:  # identity first, in C
            count = 0
        for known, said in zip(self.messages[count:], messages[count:], strict=False):
            if known != said and not same(known, said):
                break
            count += 1
        return count

    def last(self, shared: int, below: int) -> Mark | None:
        """The last turn that is among so many messages, and that something follows below so many."""
        for mark in reversed(self.marks):
            if mark.messages <= shared and mark.messages < below:
                return mark
        return None


class Capture:
    """All conversations of one attempt.

    Args:
        model: keeps the chains and samples for them.
    """

    def __init__(self, model: StreamModel) -> None:
        self._model, self._chat = model, model.chat
        self._conversations: list[Conversation] = []
        self._answers: dict[str, tuple[Conversation, int, int]] = {}
        """What an answer ended: a conversation's messages from one number to another."""
        self._number = self._calls = 0
        self._finding = asyncio.Lock()

    def live(self, ask: Ask) -> Live:
        """What the streams of this request's answer watch."""
        form = self._chat.tool_format if ask.parse else None
        return Live(self._chat.decode, self._spell, self._chat.eos_ids, ask.stop, form)

    def _spell(self, token_id: int) -> str:
        try:
            return self._chat.token(token_id)
        except ChatError:  # an engine's vocabulary may be larger than the tokenizer's; nothing is decoded of it
            return ""

    async def answer(self, ask: Ask, live: Live | None = None) -> Answer:
        """Sample the reply.

        Args:
            ask: the request.
            live: is told of the reply while it is sampled.

        Raises:
            RefusedError: the template refuses the messages, or the request names an answer that is not there.
            ContextLengthError: the history is too long.
            LLMError: the fleet does not answer.
        """
        ask = self._with_previous(ask)
        if ask.count:
            async with self._finding:
                tokens = len(await self._rendered(ask))
            return _answer(self._started(ask, tokens), Message("assistant"), "stop", 0, 0)
        async with self._finding:  # one at a time: what is found is still so when its text has been encoded
            conversation, known = await (self._find_text(ask) if ask.prompt is not None else self._find(ask))
        stream = conversation.stream
        started = self._started(ask, len(stream.ids))
        cut = Cut(self._chat.decode, ask.stop) if ask.stop else None
        if live is not None:
            live.started = started
        try:
            ids, reason = await self._model.sample(stream, max_tokens=ask.max_tokens, cut=cut, listener=live)
        except BaseException:  # a turn that did not come about leaves its chain as it was; raised again
            self._withdraw(conversation)
            if live is not None and live.left:
                self._model.dropped(stream)
            raise
        finally:
            conversation.busy = False
        reply, ended = self._read(ids, reason, ask, cut)
        finish: Finish = "tool_calls" if any(call.error is None for call in reply.tool_calls) else "stop"
        if reason == "length":
            finish = "length"
        elif cut is not None and cut.found is not None:
            finish = "stop_string"
        asked = ask.messages or (Message("user", _shown(ask.prompt)),)
        self._model.record(asked[known:], reply)
        if ask.messages:
            conversation.messages += [*ask.messages[known:], reply]
            conversation.heard = ask.messages
        if conversation.text is not None:
            conversation.text += self._chat.decode(ids)
        conversation.marks.append(Mark(len(conversation.messages), len(stream.ids), ended))
        answer = _answer(started, reply, finish, len(ids), stream.last_cached_tokens)
        if cut is not None and finish == "stop_string":
            answer = msgspec.structs.replace(answer, stopped_by=cut.found)
        if len(self._answers) < _KEPT_ANSWERS:
            self._answers[f"resp_{answer.number}"] = (conversation, ask.instructions, len(conversation.messages))
        return answer

    def _withdraw(self, conversation: Conversation) -> None:
        """A turn that did not come about leaves its chain as it was; a chain that it began is none."""
        mark = conversation.marks[-1] if conversation.marks else None
        self._model.withdraw(conversation.stream, mark.ids if mark is not None else len(conversation.stream.ids))
        if mark is None:
            self._conversations.remove(conversation)
        elif conversation.text is not None:
            conversation.text = self._chat.decode(conversation.stream.ids)

    def _started(self, ask: Ask, prompt: int) -> Started:
        self._number += 1
        return Started(number=f"{self._number:08d}", created=int(time.time()), model=ask.model, prompt_tokens=prompt)

    def _with_previous(self, ask: Ask) -> Ask:
        if ask.previous is None:
            return ask
        before = self._answers.get(ask.previous)
        if before is None:
            raise invalid(f"previous response {ask.previous!r} is not one of this session", "previous_response_id")
        conversation, start, end = before
        head, rest = ask.messages[: ask.instructions], ask.messages[ask.instructions :]
        return msgspec.structs.replace(ask, messages=(*head, *conversation.messages[start:end], *rest))

    # -- chats --------------------------------------------------------------------------------------------------------

    async def _find(self, ask: Ask) -> tuple[Conversation, int]:
        """The conversation that this request's turn belongs to, its stream ready; and how many messages it had."""
        if not ask.messages:
            raise invalid("there is no message to answer", "messages")
        best, mark = None, None
        for one in self._conversations:
            if one.text is not None or one.tools != list(ask.tools):
                continue
            fitting = one.last(one.shared(ask.messages), len(ask.messages))
            if fitting is not None and (mark is None or fitting.messages > mark.messages):
                best, mark = one, fitting
        if best is not None and mark is not None:
            bridge = self._bridge(ask, best, mark)
            if bridge is not None:
                return await self._grow(best, mark, bridge, ask), mark.messages
        return self._begin(await self._rendered(ask), ask.tools), 0

    def _bridge(self, ask: Ask, before: Conversation, mark: Mark) -> str | None:
        """What follows the turn; None where the template shows the turn otherwise once something follows it."""
        try:
            return self._chat.bridge(
                before.messages[: mark.messages], ask.messages[mark.messages :], ask.tools or None, mark.ended
            )
        except ChatError as error:
            raise invalid(str(error), "messages") from error

    async def _grow(self, before: Conversation, mark: Mark, bridge: str, ask: Ask) -> Conversation:
        """Go on at a chain's end, or begin another with what it had at an earlier turn."""
        ids = await self._encoded(bridge)
        if mark is before.marks[-1] and not before.busy and len(before.stream.ids) == mark.ids:
            before.busy = True
            before.stream.observe(ids)
            return before
        grown = self._begin([*before.stream.ids[: mark.ids], *ids], ask.tools)
        grown.messages = before.messages[: mark.messages]
        return grown

    async def _rendered(self, ask: Ask) -> list[int]:
        if isinstance(ask.prompt, str):
            return await self._encoded(ask.prompt)
        if ask.prompt is not None:
            return list(ask.prompt)
        try:
            text = self._chat.render(ask.messages, ask.tools or None, add_generation_prompt=True)
        except ChatError as error:
            raise invalid(str(error), "messages") from error
        return await self._encoded(text)

    async def _encoded(self, text: str) -> list[int]:
        if len(text) <= _LONG_CHARS:
            return self._chat.encode(text)
        return await asyncio.get_running_loop().run_in_executor(_ENCODERS, self._chat.encode, text)

    def _begin(self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Conversation:
        if not prompt:
            raise invalid("the prompt has no token", "prompt")
        conversation = Conversation(self._model.branch(prompt), tools)
        self._conversations.append(conversation)
        return conversation

    # -- completions --------------------------------------------------------------------------------------------------

    async def _find_text(self, ask: Ask) -> tuple[Conversation, int]:
        """The chain whose whole text or ids this prompt begins with, else a new one."""
        best: Conversation | None = None
        for one in self._conversations:
            if one.busy or one.text is None or (best is not None and len(one.stream.ids) <= len(best.stream.ids)):
                continue
            known = one.text if isinstance(ask.prompt, str) else tuple(one.stream.ids)
            if ask.prompt is not None and ask.prompt[: len(known)] == known:
                best = one
        if isinstance(ask.prompt, tuple):
            self._check(ask.prompt[0 if best is None else len(best.stream.ids) :])
        if best is None:
            best = self._begin(await self._rendered(ask), ())
            best.text = _shown(ask.prompt) if isinstance(ask.prompt, str) else self._chat.decode(best.stream.ids)
        elif isinstance(ask.prompt, str):
            rest = ask.prompt[len(best.text or "") :]
            best.stream.observe(await self._encoded(rest))
            best.text = ask.prompt
        elif ask.prompt is not None:
            best.stream.observe(ask.prompt[len(best.stream.ids) :])
            best.text = self._chat.decode(best.stream.ids)
        best.busy = True
        return best, 0

    def _check(self, ids: Sequence[int]) -> None:
        """An engine would refuse the whole prompt, which is no fault of the fleet."""
        if ids and not 0 <= min(ids) <= max(ids) < self._chat.vocab_size:
            raise invalid(f"a token id is out of the vocabulary of {self._chat.vocab_size}", "prompt")

    # -- replies ------------------------------------------------------------------------------------------------------

    def _read(self, ids: Sequence[int], reason: str, ask: Ask, cut: Cut | None) -> tuple[Message, bool]:
        """The reply as the client gets it, and whether its end token was sampled."""
        ended = bool(ids) and ids[-1] in self._chat.eos_ids
        text = self._chat.decode(ids[:-1] if ended else ids)
        if cut is not None and cut.found is not None:
            text = text[: self._chat.decode(ids).find(cut.found)]
        content, calls = parse_tool_calls(text, self._chat.tool_format) if ask.parse else (text, ())
        if ask.parse:  # whether calls come or not: a stream shows what is before them while nobody knows
            content = content.strip()
        return Message("assistant", content, tuple(map(self._named, calls)), finish_reason=reason), ended

    def _named(self, call: ToolCall) -> ToolCall:
        """The same call under an id that no other call of the session has."""
        self._calls += 1
        return msgspec.structs.replace(call, id=f"call_{self._calls:08d}")


def _answer(started: Started, reply: Message, finish: Finish, sampled: int, cached: int) -> Answer:
    return Answer(
        number=started.number, created=started.created, model=started.model, reply=reply, finish=finish,
        prompt_tokens=started.prompt_tokens, completion_tokens=sampled,
        cached_tokens=min(cached, started.prompt_tokens),
    )  # fmt: skip


def same(known: Message, said: Message) -> bool:
    """Whether a client says back what was said: an assistant's content but for the space around it, its calls in order.

    What it leaves out (a finish reason, an id of a call) is no difference, as no template shows it otherwise.
    """
    if known.role != said.role or known.tool_call_id != said.tool_call_id:
        return False
    if known.role != "assistant":
        return known.content == said.content
    if known.content.strip() != said.content.strip():
        return False
    calls = [call for call in known.tool_calls if call.error is None]
    return len(calls) == len(said.tool_calls) and all(
        call.error is None and (mine.name, mine.arguments) == (call.name, call.arguments) and call.id in ("", mine.id)
        for mine, call in zip(calls, said.tool_calls, strict=True)
    )


def _shown(prompt: str | tuple[int, ...] | None) -> str:
    return prompt if isinstance(prompt, str) else f"{len(prompt or ())} token ids"
