"""One harness's access to the policy: which requests it may make, which are the same again, and what ended it."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import deque
from typing import Final

from stages.errors import ContextLengthError, PolicyTimeoutError, RolloutError
from stages.gateway.anthropic_messages import Messages
from stages.gateway.asks import Answer, Ask, Dialect
from stages.gateway.capture import Capture
from stages.gateway.errors import RefusedError, invalid, too_long
from stages.gateway.histories import Heard, heard
from stages.gateway.live import Live
from stages.gateway.openai_chat import ChatCompletions, Completions
from stages.gateway.openai_responses import Responses
from stages.model import StreamModel
from stages.waiters import wake

ROUTES: Final[dict[str, Dialect]] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/completions": Completions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
    "/v1/messages/count_tokens": Messages(counting=True),
}
"""All that a capability can do."""
_REMEMBERED: Final = 64
"""Requests whose answers are kept for a client that did not get them, and that later ones go on from."""
_REMEMBERED_BYTES: Final = 1024 * 1024
"""Of their bodies together; the newest is kept whatever it has."""
LEFT_S: Final = 10.0
"""Seconds that a stream's client has to come again before its engine is told to stop; clients that retry wait less."""
_COUNTS_PER_TURN: Final = 16
"""Counts of tokens that a session answers for each turn that it has: they cost what a prompt's encoding does."""


class Exchange:
    """One request and its answer, which goes on when the client has left: it may come again for it.

    Args:
        path: one of ROUTES.
        heard: the request.
        task: samples the answer.
        live: what streams watch of it; None once the answer is there.
    """

    def __init__(self, path: str, heard: Heard, task: asyncio.Task[Answer], live: Live | None = None) -> None:
        self.path, self.heard, self.task, self.live = path, heard, task, live
        self.delivered = False
        self.waiting = 0
        self._leaving: asyncio.TimerHandle | None = None
        self._waiters: list[asyncio.Future[None]] = []
        task.add_done_callback(self._wake)

    def _wake(self, _: object) -> None:
        for waiter in self._waiters:
            wake(waiter)
        live, self.live = self.live, None  # what was sampled is in the answer now
        if live is not None:
            live.wake()

    async def ended(self) -> None:
        """Return when the answer is there, or none will be: one future, where asyncio.wait costs ten times as much."""
        if not self.task.done():
            self._waiters.append(waiter := asyncio.get_running_loop().create_future())
            await waiter

    def came(self) -> None:
        """A client waits for it."""
        self.waiting += 1
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None

    def went(self) -> None:
        """A client has it, or has left: a stream that nobody comes for again is not sampled to its end."""
        self.waiting -= 1
        if self.live is not None and not self.waiting and not self.task.done():
            self._leaving = asyncio.get_running_loop().call_later(LEFT_S, self._drop, self.live)

    def _drop(self, live: Live) -> None:
        if not self.task.done():
            live.left = True
            self.task.cancel()

    @property
    def ask(self) -> Ask:
        """What was asked."""
        return self.heard.ask

    def result(self) -> Answer:
        """The answer, once the task has ended.

        Raises:
            RefusedError: there is none, also where the session ended first.
        """
        if self.task.cancelled():
            raise RefusedError(403, "permission", "the session has ended")
        return self.task.result()


class CaptureSession:
    """What one capability opens; it ends with the session.

    Args:
        model: keeps the token streams.
        max_turns: answers at most; further requests are refused, and `ended` is set.
    """

    def __init__(self, model: StreamModel, *, max_turns: int) -> None:
        self.token = secrets.token_urlsafe(24)
        self.ended = asyncio.Event()
        """Set when no request is answered any more: the turns are spent, or `failure` says what broke."""
        self.failure: RolloutError | None = None
        self.spent = False
        """A request was refused because the turns are spent."""
        self.full: ContextLengthError | None = None
        """The last request did not fit into the model's context."""
        self._model, self._capture, self._max_turns = model, Capture(model), max_turns
        self._exchanges: deque[Exchange] = deque()
        self._kept = 0
        self._tasks: set[asyncio.Task[Answer]] = set()
        self._open = True
        self._turns = self._counts = 0

    @property
    def turns(self) -> int:
        """Answers so far, those included that are on their way."""
        return self._turns

    def opens(self, token: str) -> bool:
        """Whether this is the session's capability, and the session goes on."""
        return self._open and hmac.compare_digest(token.encode(), self.token.encode())

    def ask(self, path: str, body: bytes, *, again: bool = False) -> Exchange:
        """The exchange that this request begins, or the one that it repeats.

        A request is a repetition where the same one was not answered to its end because the client left, or where the
        client says that it tries again. One that comes again after its answer is a wish for another sample.

        Args:
            path: one of ROUTES.
            body: as it came.
            again: the client marks it as another try.

        Raises:
            RefusedError: it is wrong, or the turns are spent or the counts are, or the session has ended.
        """
        alike = [exchange for exchange in reversed(self._exchanges) if exchange.path == path]
        for exchange in alike:
            left = not exchange.delivered and exchange.waiting == 0
            if (again or left) and exchange.heard.body == body and not _failed(exchange.task):
                return exchange
        read = heard(ROUTES[path], body, (exchange.heard for exchange in alike))
        ask = read.ask
        if not self._open or self.failure is not None:
            raise RefusedError(403, "permission", f"the session has ended: {self.failure or 'it is over'}")
        if ask.count:
            if self._counts >= _COUNTS_PER_TURN * self._max_turns:
                raise RefusedError(403, "permission", f"all {self._counts} counts of tokens are spent")
            self._counts += 1
        else:
            if self._turns >= self._max_turns:
                self.spent = True
                self.ended.set()
                raise RefusedError(403, "permission", f"all {self._max_turns} turns are spent (agent.max_turns)")
            self._turns += 1
        live = self._capture.live(ask) if ask.stream else None
        task = asyncio.get_running_loop().create_task(self._answer(ask, live), name="exchange")
        self._tasks.add(task)
        exchange = Exchange(path, read, task, live)
        task.add_done_callback(lambda _: self._ended(exchange))
        if not ask.count:  # a count is cheaper made again than kept
            self._keep(exchange)
        return exchange

    def _keep(self, exchange: Exchange) -> None:
        kept = self._exchanges
        kept.append(exchange)
        self._kept += len(exchange.heard.body)
        while len(kept) > 1 and (self._kept > _REMEMBERED_BYTES or len(kept) > _REMEMBERED):
            self._kept -= len(kept.popleft().heard.body)

    async def _answer(self, ask: Ask, live: Live | None = None) -> Answer:
        try:
            answer = await self._capture.answer(ask, live)
        except ContextLengthError as error:
            self._turns -= not ask.count
            self.full = error
            raise too_long(str(error), *_lengths(error)) from error
        except RolloutError as error:
            self.failure = error
            self.ended.set()
            raise RefusedError(503, "overloaded", "the policy does not answer") from error
        except RefusedError:
            self._turns -= not ask.count
            raise
        except RecursionError as error:  # the client's doing: were it ours, an agent could take back what went badly
            self._turns -= not ask.count
            raise invalid("the request is nested too deeply", "tools") from error
        except Exception as error:  # a fault of ours: the client gets an answer, the rollout runs again
            self.fail(f"{type(error).__name__}: {error}")
            raise RefusedError(500, "server", "the gateway broke") from error
        if not ask.count:
            self.full = None
        return answer

    def _ended(self, exchange: Exchange) -> None:
        self._tasks.discard(exchange.task)
        if _failed(exchange.task) and exchange in self._exchanges:  # looked at, as nobody may have waited for it
            self._exchanges.remove(exchange)
            self._kept -= len(exchange.heard.body)

    def fail(self, why: str) -> None:
        """The gateway does not do its part: whatever the client makes of that, the rollout runs again."""
        if self.failure is None:
            self.failure = RolloutError(f"the gateway broke: {why}")
        self.ended.set()

    def end(self) -> RolloutError | None:
        """What its end means for a rollout whose agent tells nothing itself; None where nothing went wrong."""
        if self.failure is not None:
            return self.failure
        if self.spent:
            return PolicyTimeoutError(f"more than {self._max_turns} turns were asked for (agent.max_turns)")
        return self.full

    async def close(self) -> None:
        """End it: nothing is answered any more, and what is under way is cancelled. Idempotent."""
        self._open = False
        self.ended.set()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._exchanges.clear()
        self._kept = 0


def _failed(task: asyncio.Task[Answer]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _lengths(error: ContextLengthError) -> tuple[int, int]:
    """Tokens and context length, where the error knows them."""
    return int(error.detail.get("tokens", 0)), int(error.detail.get("length", 0))
