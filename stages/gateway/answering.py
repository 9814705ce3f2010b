"""One request of a connection, from its bytes to its answer, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from stages.gateway.asks import Dialect, pieces
from stages.gateway.bodies import Hold
from stages.gateway.errors import RefusedError, unknown_key
from stages.gateway.framing import chunks, whole
from stages.gateway.live import Live, Started
from stages.gateway.session import ROUTES, CaptureSession, Exchange

QUIET_S: Final = 5.0
"""A stream begins with its first token, at the latest after so long, and says something as often; before it begins an
error has its own status."""
_PLAIN: Final = ROUTES["/v1/chat/completions"]
"""Words errors of requests to no route."""
_log = logging.getLogger(__name__)


class Request(msgspec.Struct):
    """A request as it came.

    Args:
        method: as its first line says.
        path: one of ROUTES, or none.
        token: of a capability, or none.
        again: the client marks it as another try.
        body: all of it.
        keep: the connection stays after its answer.
        hold: counts the body.
        refused: why it gets no answer, where that is known already.
        exchange: what came of it.
    """

    method: str
    path: str
    token: str
    again: bool
    body: bytes
    keep: bool
    hold: Hold
    refused: RefusedError | None = None
    exchange: Exchange | None = None

    def over(self) -> None:
        """Its connection does nothing more for it: the body is held as long as its answer is on its way."""
        if self.exchange is None or self.exchange.task.done():
            self.hold.free()
        else:
            self.exchange.task.add_done_callback(lambda _: self.hold.free())


class Channel(Protocol):
    """The connection that a request came by."""

    @property
    def closing(self) -> bool:
        """Nothing that is written gets to the client any more."""
        ...

    def write(self, data: bytes) -> None:
        """Send bytes; nothing where it is closing."""
        ...

    async def drained(self) -> None:
        """Return when what was written has left, or the connection is lost."""
        ...

    def abort(self) -> None:
        """Close at once."""
        ...


def error_body(path: str, refused: RefusedError) -> bytes:
    """An error in the words of a route's dialect."""
    return ROUTES.get(path, _PLAIN).error(refused)


async def answer(request: Request, find: Callable[[str], CaptureSession | None], channel: Channel) -> None:
    """Answer a request; whatever happens, its client gets an answer, or the connection ends.

    Args:
        request: as it came.
        find: the open session of a token.
        channel: its connection.
    """
    begun = _Begun()
    try:
        exchange, dialect = _asked(request, find)
        await _exchange(exchange, dialect, request, channel, begun)
    except RefusedError as refused:
        channel.write(whole(refused.status, error_body(request.path, refused), keep=request.keep))
    except Exception:  # noqa: BLE001 - a fault of ours, or a request made to find one: the client gets an answer
        _log.exception("a request to %s broke", request.path)
        if begun.stream:
            channel.abort()
        else:
            broke = RefusedError(500, "server", "the gateway broke")
            channel.write(whole(500, error_body(request.path, broke), keep=request.keep))


class _Begun:
    """Whether a stream has begun, so that no status can be said any more."""

    stream = False


def _asked(request: Request, find: Callable[[str], CaptureSession | None]) -> tuple[Exchange, Dialect]:
    if request.refused is not None:
        raise request.refused
    session = find(request.token)
    if session is None:
        raise unknown_key()
    dialect = ROUTES.get(request.path)
    if dialect is None:
        raise RefusedError(404, "not_found", f"there is no {request.path} here; {', '.join(ROUTES)} are")
    if request.method != "POST":
        raise RefusedError(405, "invalid_request", f"{request.path} takes POST alone")
    request.exchange = session.ask(request.path, request.body, again=request.again)
    return request.exchange, dialect


async def _exchange(exchange: Exchange, dialect: Dialect, request: Request, channel: Channel, begun: _Begun) -> None:
    exchange.came()
    try:
        if exchange.ask.stream:
            await _stream(exchange, dialect, channel, begun)
        else:
            await exchange.ended()
            channel.write(whole(200, dialect.write(exchange.ask, exchange.result()), keep=request.keep))
        await channel.drained()
        exchange.delivered = not channel.closing
    finally:
        exchange.went()


async def _stream(exchange: Exchange, dialect: Dialect, channel: Channel, begun: _Begun) -> None:
    """What is sampled, while it is sampled; a client that reads slowly gets more at once, and nothing queues for it."""
    stream = _Stream(exchange, dialect, channel, begun)
    live, loop = exchange.live, asyncio.get_running_loop()
    said_at = loop.time()
    while live is not None and not exchange.task.done():
        seen = live.changes
        events = stream.more(live)
        if not events and loop.time() - said_at >= QUIET_S:
            events = [dialect.ping]
        if events:
            stream.write(events)
            await channel.drained()
            said_at = loop.time()
        await live.after(seen, max(0.0, said_at + QUIET_S - loop.time()))
    stream.end()


class _Stream:
    """One stream: what of its answer it has told."""

    def __init__(self, exchange: Exchange, dialect: Dialect, channel: Channel, begun: _Begun) -> None:
        self._exchange, self._dialect, self._channel, self._begun = exchange, dialect, channel, begun
        self._teller = dialect.teller(exchange.ask)
        self._opened = False
        self._told: list[str] = []

    def write(self, events: list[bytes], *, end: bool = False) -> None:
        """Send events; the head goes before the first ones."""
        framed = chunks(events, begin=not self._begun.stream, end=end)
        self._begun.stream = True
        self._channel.write(framed)

    def more(self, live: Live) -> list[bytes]:
        """What can be told of a turn that goes on, and was not yet."""
        if live.started is None or not live.begun:
            return []
        events = self._opening(live.started)
        texts = live.texts()
        if len(texts) > len(self._told):
            text = "".join(texts[len(self._told) :])
            self._told += texts[len(self._told) :]
            events += self._teller.text(text)
        return events

    def _opening(self, started: Started) -> list[bytes]:
        if self._opened:
            return []
        self._opened = True
        return list(self._teller.begin(started))

    def end(self) -> None:
        """Tell the rest of the answer, or what came in its place."""
        try:
            answer = self._exchange.result()
        except RefusedError as refused:
            if not self._begun.stream:
                raise
            self.write([self._dialect.error_event(refused)], end=True)
            return
        events, told = self._opening(answer), sum(map(len, self._told))
        for piece in pieces(answer.reply.content[told:]):
            events += self._teller.text(piece)
        self.write([*events, *self._teller.end(answer)], end=True)
