"""One request of a connection, from its bytes to its answer, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from stages.gateway.asks import Dialect
from stages.gateway.bodies import Hold
from stages.gateway.errors import RefusedError, unknown_key
from stages.gateway.framing import chunks, whole
from stages.gateway.session import ROUTES, CaptureSession, Exchange

QUIET_S: Final = 5.0
"""A stream begins at the latest after so long, and says something as often; before that an error has its own status."""
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
    exchange.waiting += 1
    try:
        if exchange.ask.stream:
            await _stream(exchange, dialect, channel, begun)
        else:
            await asyncio.wait({exchange.task})
            channel.write(whole(200, dialect.write(exchange.ask, exchange.result()), keep=request.keep))
        await channel.drained()
        exchange.delivered = not channel.closing
    finally:
        exchange.waiting -= 1


async def _stream(exchange: Exchange, dialect: Dialect, channel: Channel, begun: _Begun) -> None:
    def write(events: Iterable[bytes], *, end: bool) -> None:
        data = chunks(events, begin=not begun.stream, end=end)
        begun.stream = True
        channel.write(data)

    while not exchange.task.done():
        await asyncio.wait({exchange.task}, timeout=QUIET_S)
        if not exchange.task.done():
            write([dialect.ping], end=False)
    try:
        events = dialect.events(exchange.ask, exchange.result())
    except RefusedError as refused:
        if not begun.stream:
            raise
        events = iter([dialect.error_event(refused)])
    write(events, end=True)
