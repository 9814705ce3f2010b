"""A capture gateway on loopback over a policy whose answers a test writes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox.directory import loopback
from stages.chat import ChatTokenizer
from stages.dialects import Completion, Piece
from stages.engine_client import EngineClient, EngineUnavailableError
from stages.gateway.server import GatewayServer, opened
from stages.gateway.session import CaptureSession
from stages.hearing import Hear
from stages.model import Sampler, StreamModel
from stages.trajectory import Chain, Sampling, VersionSpan
from stages.wire import SessionOut

POLICY = Path(__file__).parents[2] / "workflows" / "policies" / "tiny"
END = "<|im_end|>"
Says = str | list[int] | Exception


def call(name: str, arguments: str) -> str:
    """A tool call as the tiny policy's template teaches it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class SayingEngine:
    """Answers in order with texts (their end token after them), ids as they are, or raises; `prompts` are what came.

    Each answer's tokens have the log-probs -1, -2, ...; `hold` keeps answers back until it is set. To a listener it
    says them in pieces as `split` makes them; after `said` tokens, where that is set, it waits for `go_on`. `breaks`
    holds, for one generation after the other, after how many tokens the connection is lost; None: not at all.
    """

    def __init__(self, chat: ChatTokenizer, says: Sequence[Says] | Callable[[list[int]], Says], context: int = 8192):
        self._chat, self._says, self._context = chat, says if callable(says) else list(says), context
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.split: Callable[[list[int]], list[list[int]]] = lambda ids: [[one] for one in ids]
        self.said: int | None = None
        self.go_on = asyncio.Event()
        self.breaks: list[int | None] = []
        self.cancelled = 0

    async def context_length(self, url: str) -> int:
        return self._context

    async def generate(
        self, url: str, token_ids: Sequence[int], sampling: Sampling, *, name: str, timeout_s: float,
        hear: Hear | None = None,
    ) -> Completion:  # fmt: skip
        self.prompts.append(list(token_ids))
        self.samplings.append(sampling)
        try:
            await self.hold.wait()
            return await self._generate(list(token_ids), sampling, hear)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _generate(self, token_ids: list[int], sampling: Sampling, hear: Hear | None) -> Completion:
        said = self._says(token_ids) if callable(self._says) else self._says.pop(0)
        if isinstance(said, Exception):
            raise said
        ids = said if isinstance(said, list) else [*self._chat.encode(said), *self._chat.encode(END)]
        finish = "stop"
        if len(ids) > sampling.max_tokens:
            ids, finish = ids[: sampling.max_tokens], "length"
        spans = [VersionSpan(3, 0, len(ids))]
        logprobs = [-1.0 - n for n in range(len(ids))]
        if hear is not None:
            await self._tell(hear, ids, logprobs, finish, spans)
        return Completion(ids, logprobs, finish, spans, min(8, len(token_ids)), 0.001)

    async def _tell(
        self, hear: Hear, ids: list[int], logprobs: list[float], finish: str, spans: list[VersionSpan]
    ) -> None:
        breaks_at = self.breaks.pop(0) if self.breaks else None
        told = 0
        for part in self.split(ids):
            if told == self.said:
                await self.go_on.wait()
            if breaks_at is not None and told + len(part) > breaks_at:
                raise EngineUnavailableError("the connection was lost", "read")
            end = told + len(part)
            last = end == len(ids)
            hear(Piece(part, logprobs[told:end], finish if last else None, spans if last else [], None, True))
            told = end
            await asyncio.sleep(0)


class RecordingEngine:
    """A real engine; `prompts` and `completions` are what it was asked and what it said."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.prompts: list[list[int]] = []
        self.completions: list[Completion] = []

    async def context_length(self, url: str) -> int:
        return await self._client.context_length(url)

    async def generate(
        self, url: str, token_ids: Sequence[int], sampling: Sampling, *, name: str, timeout_s: float,
        hear: Hear | None = None,
    ) -> Completion:  # fmt: skip
        self.prompts.append(list(token_ids))
        drawn = await self._client.generate(url, token_ids, sampling, name=name, timeout_s=timeout_s, hear=hear)
        self.completions.append(drawn)
        return drawn


@dataclass
class Held:
    """What a test holds of a gateway, whatever its engine is."""

    url: str
    session: CaptureSession
    model: StreamModel
    chat: ChatTokenizer

    @property
    def chains(self) -> list[Chain]:
        return self.model.trajectory().chains


@dataclass
class Gateway(Held):
    """One over an engine of the test's."""

    engine: SayingEngine


@dataclass
class LiveGateway(Held):
    """One over a real engine."""

    engine: RecordingEngine


def model_over(
    engine: Sampler, chat: ChatTokenizer, sampling: Sampling | None = None, url: str = "http://replica-1",
    patience_s: float = 0.05,
) -> StreamModel:  # fmt: skip
    """A worker's model over an engine of the test's, or one at an address."""

    async def session(failed: str | None) -> SessionOut:
        return SessionOut("1", "replica-1", url, 3)

    return StreamModel(engine, session, chat, sampling or Sampling(max_tokens=512), name="t", patience_s=patience_s)


@contextlib.asynccontextmanager
async def gateway(
    says: Sequence[Says] | Callable[[list[int]], Says], *, max_turns: int = 16, context: int = 8192,
    patience_s: float = 0.05, sampling: Sampling | None = None,
) -> AsyncIterator[Gateway]:  # fmt: skip
    """A gateway with one session."""
    chat = ChatTokenizer.load(POLICY)
    engine = SayingEngine(chat, says, context)
    model = model_over(engine, chat, sampling, patience_s=patience_s)
    session = CaptureSession(model, max_turns=max_turns)
    async with GatewayServer() as server, opened(server, session):
        port = await server.listen(loopback())
        yield Gateway(f"http://127.0.0.1:{port}", session, model, chat, engine)


@contextlib.asynccontextmanager
async def live_gateway(
    url: str, key: str, *, sampling: Sampling | None = None, policy: Path = POLICY
) -> AsyncIterator[LiveGateway]:
    """A gateway with one session, in front of the engine at this address."""
    chat = ChatTokenizer.load(policy)
    async with EngineClient(api_key=key) as client:
        engine = RecordingEngine(client)
        model = model_over(engine, chat, sampling, url)
        session = CaptureSession(model, max_turns=64)
        async with GatewayServer() as server, opened(server, session):
            port = await server.listen(loopback())
            yield LiveGateway(f"http://127.0.0.1:{port}", session, model, chat, engine)


def exact(held: Gateway | LiveGateway) -> None:
    """Every generation's prompt is the recorded stream up to where it was sampled: no token was encoded anew."""
    sampled = [(chain, turn) for chain in held.chains for turn in chain.turns]
    prompts = {tuple(prompt) for prompt in held.engine.prompts}
    assert sampled and len(sampled) <= len(held.engine.prompts)
    for chain, turn in sampled:
        assert tuple(chain.token_ids[: turn.start]) in prompts
        assert set(chain.loss_mask[turn.start : turn.end]) == {1}
    for chain in held.chains:
        assert len(chain.token_ids) == len(chain.loss_mask) == len(chain.logprobs)
        assert sum(chain.loss_mask) == sum(turn.end - turn.start for turn in chain.turns)
