"""The Model an agent talks to: messages in and out above, one exact token stream below."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from stages.chat import ChatTokenizer, parse_tool_calls
from stages.checkpoint import StreamState
from stages.engine_client import Completion, EngineUnavailableError
from stages.errors import ContextLengthError, LLMError
from stages.hearing import Hear, Heard, Listener
from stages.stream import ABORT, TokenStream
from stages.trajectory import Message, Sampling, Trajectory
from stages.wire import SessionOut

RETRY_S: Final = (0.1, 2.0)
LEAST_S: Final = 0.05
"""What a try may take at least that is made just before the deadline."""

SEEKING_S: Final = 2.0
"""Seconds that the router takes to name a replica when one is ready, by a wide margin."""

OpenSession = Callable[[str | None], Awaitable[SessionOut]]
"""Gives the attempt's replica, before each generation; the argument names one that has just failed."""
Cut = Callable[[Completion], Completion]
"""Leaves off the end of what an engine sampled; what is left is as it came."""
Hold = Callable[[], Awaitable[None]]
"""Awaited at each boundary between turns; returns when the agent may go on."""


class Sampler(Protocol):
    """What samples for a stream; `stages.engine_client.EngineClient` is the real one."""

    async def context_length(self, url: str) -> int:
        """See EngineClient."""
        ...

    async def generate(
        self, url: str, token_ids: Sequence[int], sampling: Sampling, *, name: str, timeout_s: float,
        hear: Hear | None = None,
    ) -> Completion:  # fmt: skip
        """See EngineClient."""
        ...


class StreamModel:
    """Keeps the chains of one attempt.

    Args:
        engine: client to the fleet.
        open_session: asks the router for this attempt's replica.
        chat: tokenizer and template of the policy.
        sampling: sampling params; with a seed, each turn draws from its own seed derived from it.
        name: names requests in the engine's logs.
        patience_s: seconds from the first failure of a call until it is given up.
        answer_s: seconds that one generation may take; the attempt's budget is what bounds it as a rule.
        logprobs_mode: of which distribution the log-probs are.
        hold: awaited before each generation, when all that came before it has ended.
    """

    def __init__(
        self,
        engine: Sampler,
        open_session: OpenSession,
        chat: ChatTokenizer,
        sampling: Sampling,
        *,
        name: str,
        patience_s: float = 120.0,
        answer_s: float = 3600.0,
        logprobs_mode: Literal["processed", "raw"] = "processed",
        hold: Hold | None = None,
    ) -> None:
        self._engine, self._open_session, self._chat, self._sampling = engine, open_session, chat, sampling
        self._name, self._patience_s, self._answer_s = name, patience_s, answer_s
        self._logprobs_mode: Literal["processed", "raw"] = logprobs_mode
        self._streams: list[TokenStream] = []
        self._messages: list[Message] = []
        self._tools: list[Mapping[str, Any]] = []
        self._transcript: list[Message] = []
        self._history: list[Message] = []
        self._asked: list[Message] | None = None
        self._hold = hold
        self._ended_by_itself = True
        self._answered_at: float | None = None
        self._malformed = 0
        self.llm_s = 0.0
        self.tool_s = 0.0
        self._failing: dict[TokenStream, str] = {}  # of calls under way, or cancelled
        self._seeking_at: dict[TokenStream, float] = {}

    @property
    def unanswered(self) -> str | None:
        """What the fleet fails to answer the present call with, or None: time that passes so is not the policy's."""
        if not self._failing and any(time.monotonic() - since > SEEKING_S for since in self._seeking_at.values()):
            return f"no replica was given within {SEEKING_S:g} s"
        return next(iter(self._failing.values()), None)

    async def generate(self, *, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Message:
        """Sample the next assistant message; see Model."""
        self._charge_tools()
        self._history = list(messages)
        if self._hold is not None:
            await self._hold()
        if self._asked is None or self._asked != list(messages) or self._tools != list(tools):
            self._continue(messages, tools)
        stream = self._streams[-1]
        await self._sample_to_its_end(stream)
        reply = self._read(*stream.last_turn)
        self._took(messages, reply, tools)
        self._answered_at = time.perf_counter()
        return reply

    def say(self, *, messages: Sequence[Message], reply: Message, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Record an assistant message that was not sampled; see Model."""
        before = self._chat.render(messages, tools or None, add_generation_prompt=True)
        after = self._chat.render([*messages, reply], tools or None, add_generation_prompt=False)
        stream = TokenStream(self._chat.encode(before))
        if after.startswith(before):
            stream.observe(self._chat.encode(after[len(before) :]))
        self._streams.append(stream)
        self._took(messages, reply, tools)

    @property
    def chat(self) -> ChatTokenizer:
        """Tokenizer and template of the policy, for what keeps chains of its own (the capture gateway)."""
        return self._chat

    def branch(self, prompt: Sequence[int]) -> TokenStream:
        """Begin a chain with these ids; `sample` draws its turns, and the trajectory holds it."""
        self._charge_tools()
        stream = TokenStream(prompt)
        self._streams.append(stream)
        return stream

    def withdraw(self, stream: TokenStream, length: int) -> None:
        """A turn did not come about: its stream is again as long as it was before, and none where it had no turn."""
        stream.retract(length)
        if stream.turns == 0 and not stream.cut_tokens:
            self._streams.remove(stream)

    async def sample(
        self, stream: TokenStream, *, max_tokens: int | None = None, cut: Cut | None = None,
        listener: Listener | None = None,
    ) -> tuple[list[int], str]:  # fmt: skip
        """One whole turn of one chain, whichever it is; several chains may sample at once.

        Args:
            stream: one that `branch` gave, with all that comes before the turn on it.
            max_tokens: bounds the turn beside the sampling params.
            cut: leaves off the end of what came, as far as the turn does not want it.
            listener: hears the ids while they are sampled, before any is cut off, from engines that stream.

        Returns:
            What was sampled, and its finish reason.

        Raises:
            ContextLengthError: the chain is full.
            LLMError: the engine gave no answer within the deadline.
        """
        self._charge_tools()
        if self._hold is not None:
            await self._hold()
        await self._sample_to_its_end(stream, max_tokens, cut, listener)
        self._answered_at = time.perf_counter()
        return stream.last_turn

    async def _sample_to_its_end(
        self, stream: TokenStream, max_tokens: int | None = None, cut: Cut | None = None,
        listener: Listener | None = None,
    ) -> None:  # fmt: skip
        try:
            await self._sample(stream, max_tokens, cut, listener)
        except Exception:  # it has ended; what was cancelled has not; raised again
            self._answered(stream)
            raise
        self._answered(stream)

    def _answered(self, stream: TokenStream) -> None:
        """The fleet is away for this chain no more."""
        self._failing.pop(stream, None)
        self._seeking_at.pop(stream, None)

    def dropped(self, stream: TokenStream) -> None:
        """Nobody wants the turn any more that was cancelled: that the fleet was away for it says nothing."""
        self._answered(stream)

    def record(self, messages: Sequence[Message], reply: Message) -> None:
        """Write down what a turn was asked with and said, for people; chains are kept by `branch` and `sample`."""
        self._transcript += [*messages, reply]
        self._malformed += sum(call.error is not None for call in reply.tool_calls)

    def _continue(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Bring the last chain to where these messages' reply is sampled.

        A new chain begins where they rewrite what was said before, or take the place of what was asked in vain.
        """
        known, asked = len(self._messages), self._asked
        bridge = None
        if self._streams and asked is None and list(messages[:known]) == self._messages and list(tools) == self._tools:
            bridge = self._chat.bridge(self._messages, messages[known:], tools or None, self._ended_by_itself)
        if bridge is not None:
            self._streams[-1].observe(self._chat.encode(bridge))
            self._transcript += messages[known:]
        else:
            text = self._chat.render(messages, tools or None, add_generation_prompt=True)
            self._streams.append(TokenStream(self._chat.encode_prompt(text)))
            self._transcript += messages
        self._asked, self._tools = list(messages), list(tools)

    def _charge_tools(self) -> None:
        """Charge what passed since the last reply to its turn."""
        if self._answered_at is not None:
            spent_s = time.perf_counter() - self._answered_at
            self._streams[-1].spent_on_tools(spent_s)
            self.tool_s += spent_s
            self._answered_at = None

    def _took(self, messages: Sequence[Message], reply: Message, tools: Sequence[Mapping[str, Any]]) -> None:
        if not self._transcript:
            self._transcript += messages
        self._messages = [*messages, reply]
        self._history, self._asked, self._tools = self._messages, None, list(tools)
        self._transcript.append(reply)

    def _params(self, stream: TokenStream, max_tokens: int | None = None) -> Sampling:
        """For what is left of the turn. A rest draws from a seed of its own: the same would repeat the same draws."""
        most = self._sampling.max_tokens if max_tokens is None else min(max_tokens, self._sampling.max_tokens)
        left = most - stream.cut_tokens
        if self._sampling.seed is None:
            return msgspec.structs.replace(self._sampling, max_tokens=left)
        text = f"{self._sampling.seed}:{self._streams.index(stream) + 1}:{stream.turns}"
        text += f":{stream.cut_tokens}" if stream.cut_tokens else ""
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
        return msgspec.structs.replace(self._sampling, max_tokens=left, seed=seed)

    def _read(self, ids: Sequence[int], finish_reason: str) -> Message:
        self._ended_by_itself = bool(ids) and ids[-1] in self._chat.eos_ids
        text = self._chat.decode(ids[:-1] if self._ended_by_itself else ids)
        content, calls = parse_tool_calls(text, self._chat.tool_format)
        self._malformed += sum(call.error is not None for call in calls)
        return Message("assistant", content, calls, finish_reason=finish_reason)

    async def _sample(
        self, stream: TokenStream, max_tokens: int | None, cut: Cut | None, listener: Listener | None
    ) -> None:
        """One whole turn onto the stream, asked for again while replicas fail; the deadline counts from the first time.

        A replica that is leaving answers with what it drew so far: that stays, and another one draws the rest. Of one
        that breaks off what a listener has passed on stays.
        """
        give_up_at: float | None = None
        wait_s, failed = RETRY_S[0], None
        self._answered(stream)
        while (params := self._params(stream, max_tokens)).max_tokens > 0:
            self._seeking_at[stream] = time.monotonic()
            session, failed = await self._open_session(failed), None
            self._seeking_at.pop(stream, None)
            error = f"replica {session.replica_id} aborted the generation"
            asked_away_s, answered = 0.0, False
            heard = None if listener is None else Heard(listener)
            completion: Completion | None
            try:
                left_s = self._answer_s if give_up_at is None else give_up_at - time.monotonic()
                completion = await self._generate(session.replica_url, stream, params, max(LEAST_S, left_s), heard)
            except EngineUnavailableError as unavailable:
                error, asked_away_s = str(unavailable), unavailable.retry_after_s
                completion = None if heard is None else heard.broken_off(session.policy_version, ABORT)
            else:
                if heard is not None:
                    heard.ended(completion)
            if completion is not None:
                self.llm_s += completion.llm_s
                completion = completion if cut is None else cut(completion)
                if completion.finish_reason != ABORT or completion.token_ids:
                    stream.sampled(completion, session.replica_id)
                    give_up_at, answered = None, bool(completion.token_ids)
                if completion.finish_reason != ABORT:
                    return
            now = time.monotonic()
            give_up_at = give_up_at or now + self._patience_s
            self._answered(stream)
            if not answered:
                self._failing[stream] = error
            pause_s = max(wait_s, asked_away_s)
            if now + pause_s > give_up_at:
                raise LLMError(f"no replica answered for {self._patience_s:g} s: {error}")
            failed = session.replica_id
            await asyncio.sleep(pause_s)
            wait_s = min(RETRY_S[1], wait_s * 2)
        stream.close("length")

    async def _generate(
        self, url: str, stream: TokenStream, sampling: Sampling, timeout_s: float, heard: Heard | None
    ) -> Completion:
        length = await self._engine.context_length(url)
        room = length - len(stream.ids)
        if room <= 0:
            raise ContextLengthError(
                f"the stream has {len(stream.ids)} tokens, the model's context is {length}",
                tokens=len(stream.ids), length=length,
            )  # fmt: skip
        bounded = msgspec.structs.replace(sampling, max_tokens=min(room, sampling.max_tokens))
        more: dict[str, Hear] = {} if heard is None else {"hear": heard}
        return await self._engine.generate(
            url, stream.ids, bounded, name=self._name, timeout_s=min(timeout_s, self._answer_s), **more
        )

    def trajectory(self) -> Trajectory:
        """Everything so far."""
        self._charge_tools()
        chains = [stream.chain() for stream in self._streams]
        return Trajectory(chains, list(self._transcript), self._logprobs_mode, self._malformed)

    @property
    def turns(self) -> int:
        """Whole generations so far."""
        return sum(stream.turns for stream in self._streams)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that engines sampled so far."""
        return sum(stream.sampled_tokens for stream in self._streams)

    def snapshot(self) -> StreamState:
        """Everything that `restore` needs; taken while nothing is being generated."""
        self._charge_tools()
        return StreamState(
            [stream.chain() for stream in self._streams], list(self._messages), [dict(tool) for tool in self._tools],
            list(self._transcript), list(self._history), self._asked, self._ended_by_itself, self._malformed,
            self.llm_s, self.tool_s,
        )  # fmt: skip

    def restore(self, state: StreamState) -> None:
        """Become the model that the snapshot was taken of; its next prompt is that one's stream."""
        self._streams = [TokenStream.of(chain) for chain in state.chains]
        self._messages, self._tools = list(state.conversation), list(state.tools)
        self._transcript, self._history = list(state.transcript), list(state.history)
        self._asked, self._ended_by_itself = state.asked, state.ended_by_itself
        self._malformed, self.llm_s, self.tool_s = state.malformed, state.llm_s, state.tool_s
