"""The Model an agent talks to: messages in and out above, one exact token stream below."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from stages.chat import ChatTokenizer, parse_tool_calls
from stages.engine_client import Completion, EngineClient, EngineUnavailableError
from stages.errors import ContextLengthError, LLMError
from stages.stream import TokenStream
from stages.trajectory import Message, Sampling, Trajectory
from stages.wire import SessionOut

RETRY_S: Final = (0.1, 2.0)

OpenSession = Callable[[str | None], Awaitable[SessionOut]]
"""Gives the attempt's replica; the argument names one that has just failed."""


class StreamModel:
    """Keeps the chains of one attempt.

    Args:
        engine: client to the fleet.
        open_session: asks the router for this attempt's replica.
        chat: tokenizer and template of the policy.
        sampling: sampling params; with a seed, each turn draws from its own seed derived from it.
        name: names requests in the engine's logs.
        patience_s: seconds from the first failure of a call until it is given up.
    """

    def __init__(
        self,
        engine: EngineClient,
        open_session: OpenSession,
        chat: ChatTokenizer,
        sampling: Sampling,
        *,
        name: str,
        patience_s: float = 120.0,
        logprobs_mode: Literal["processed", "raw"] = "processed",
    ) -> None:
        self._engine, self._open_session, self._chat, self._sampling = engine, open_session, chat, sampling
        self._name, self._patience_s = name, patience_s
        self._logprobs_mode: Literal["processed", "raw"] = logprobs_mode
        self._streams: list[TokenStream] = []
        self._messages: list[Message] = []
        self._tools: list[Mapping[str, Any]] = []
        self._transcript: list[Message] = []
        self._session: SessionOut | None = None
        self._ended_by_itself = True
        self._answered_at: float | None = None
        self._malformed = 0
        self.llm_s = 0.0
        self.tool_s = 0.0

    async def generate(self, *, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Message:
        """Sample the next assistant message; see Model."""
        stream = self._continue(messages, tools)
        sampling = msgspec.structs.replace(self._sampling, seed=self._turn_seed(stream.turns))
        completion, replica = await self._sample(stream, sampling)
        stream.sampled(completion, replica)
        self.llm_s += completion.llm_s
        reply = self._read(completion)
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

    def _continue(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> TokenStream:
        """The stream that these messages continue; a new chain where they rewrite what was said before."""
        if self._answered_at is not None:
            spent_s = time.perf_counter() - self._answered_at
            self._streams[-1].spent_on_tools(spent_s)
            self.tool_s += spent_s
            self._answered_at = None
        known = len(self._messages)
        if self._streams and list(messages[:known]) == self._messages and list(tools) == self._tools:
            new = messages[known:]
            bridge = self._chat.bridge(self._messages, new, tools or None, self._ended_by_itself)
            if bridge is not None:
                self._streams[-1].observe(self._chat.encode(bridge))
                self._transcript += new
                return self._streams[-1]
        stream = TokenStream(self._chat.encode(self._chat.render(messages, tools or None, add_generation_prompt=True)))
        self._streams.append(stream)
        self._transcript += messages
        return stream

    def _took(self, messages: Sequence[Message], reply: Message, tools: Sequence[Mapping[str, Any]]) -> None:
        if not self._transcript:
            self._transcript += messages
        self._messages = [*messages, reply]
        self._tools = list(tools)
        self._transcript.append(reply)

    def _turn_seed(self, turn: int) -> int | None:
        if self._sampling.seed is None:
            return None
        text = f"{self._sampling.seed}:{len(self._streams)}:{turn}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")

    def _read(self, completion: Completion) -> Message:
        ids = completion.token_ids
        self._ended_by_itself = bool(ids) and ids[-1] in self._chat.eos_ids
        text = self._chat.decode(ids[:-1] if self._ended_by_itself else ids)
        content, calls = parse_tool_calls(text)
        self._malformed += sum(call.error is not None for call in calls)
        return Message("assistant", content, calls, finish_reason=completion.finish_reason)

    async def _sample(self, stream: TokenStream, sampling: Sampling) -> tuple[Completion, str]:
        """One generation, asked again while replicas fail; the deadline counts from the first failure."""
        give_up_at: float | None = None
        wait_s, failed = RETRY_S[0], None
        while True:
            if self._session is None or failed is not None:
                self._session = await self._open_session(failed)
                failed = None
            session = self._session
            try:
                completion = await self._generate(session.replica_url, stream, sampling)
            except EngineUnavailableError as error:
                now = time.monotonic()
                give_up_at = give_up_at or now + self._patience_s
                if now + wait_s > give_up_at:
                    raise LLMError(f"no replica answered for {self._patience_s:g} s: {error}") from error
                failed = session.replica_id
                await asyncio.sleep(wait_s)
                wait_s = min(RETRY_S[1], wait_s * 2)
            else:
                return completion, session.replica_id

    async def _generate(self, url: str, stream: TokenStream, sampling: Sampling) -> Completion:
        length = await self._engine.context_length(url)
        room = length - len(stream.ids)
        if room <= 0:
            raise ContextLengthError(f"the stream has {len(stream.ids)} tokens, the model's context is {length}")
        bounded = msgspec.structs.replace(sampling, max_tokens=min(room, sampling.max_tokens))
        return await self._engine.generate(url, stream.ids, bounded, name=self._name, timeout_s=self._patience_s)

    def trajectory(self) -> Trajectory:
        """Everything so far."""
        if self._answered_at is not None:
            spent_s = time.perf_counter() - self._answered_at
            self._streams[-1].spent_on_tools(spent_s)
            self.tool_s += spent_s
            self._answered_at = None
        chains = [stream.chain() for stream in self._streams]
        return Trajectory(chains, list(self._transcript), self._logprobs_mode, self._malformed)
