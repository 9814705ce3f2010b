"""The gateway's HTTP server: httptools on asyncio's own protocols, for requests of up to 64 KB at thousands a second.

A framework costs ten times what an answer does here, and what is served is small: five routes, one body in, one answer
or one stream of events out. One request of a connection is answered at a time; what a client sends
before it has its answer waits in the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, cast

import httptools
import msgspec

from stages.gateway.asks import Dialect
from stages.gateway.errors import RefusedError, unknown_key
from stages.gateway.session import ROUTES, CaptureSession, Exchange

MAX_BODY: Final = 4 * 1024 * 1024
"""Of a request: some times what the longest contexts hold. Larger ones cost the worker minutes of encoding."""
MAX_HEAD: Final = 64 * 1024
MAX_CONNECTIONS: Final = 512
STRANGER_S: Final = 30.0
"""Seconds until a connection must have shown a capability once."""
QUIET_S: Final = 5.0
"""A stream begins at the latest after so long, and says something as often; before that an error has its own status."""
_REASONS: Final = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    413: "Content Too Large", 500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip
CAPABILITY: Final = "/cap/"
"""Before a token in the path of a request."""
_PLAIN: Final = ROUTES["/v1/chat/completions"]
"""Words errors of requests to no route."""
_log = logging.getLogger(__name__)


class GatewayServer:
    """Serves sessions on sockets; a session is found by its token, in the key of a request or in its path."""

    def __init__(self) -> None:
        self._sessions: dict[str, CaptureSession] = {}
        self._servers: list[asyncio.Server] = []
        self._connections: set[_Connection] = set()

    async def listen(self, sock: socket.socket) -> int:
        """Serve on a socket, which is the server's from now on; its port."""
        port = int(sock.getsockname()[1])
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(self._find, self._connections), sock=sock)
        self._servers.append(server)
        return port

    def add(self, session: CaptureSession) -> None:
        """Answer to a session's token."""
        self._sessions[session.token] = session

    def remove(self, session: CaptureSession) -> None:
        """Answer to it no more."""
        self._sessions.pop(session.token, None)

    def _find(self, token: str) -> CaptureSession | None:
        session = self._sessions.get(token)
        return session if session is not None and session.opens(token) else None

    async def close(self) -> None:
        """Close every socket and connection."""
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.abort()
        self._servers.clear()

    async def __aenter__(self) -> GatewayServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@contextlib.asynccontextmanager
async def opened(server: GatewayServer, session: CaptureSession) -> AsyncIterator[CaptureSession]:
    """The session, served while the block runs."""
    server.add(session)
    try:
        yield session
    finally:
        server.remove(session)
        await session.close()


class _Request(msgspec.Struct, frozen=True):
    """One request as it came."""

    method: str
    path: str
    token: str
    again: bool
    body: bytes
    keep: bool


class _Connection(asyncio.Protocol):
    """One client's connection; `known` are all of the server's."""

    def __init__(self, find: Callable[[str], CaptureSession | None], known: set[_Connection]) -> None:
        self._find, self._known = find, known
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: list[_Request] = []
        self._stranger: asyncio.TimerHandle | None = None
        self._streaming = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._begin()

    def _begin(self) -> None:
        self._url, self._token, self._again, self._expects = b"", "", False, False
        self._headed = self._opens = self._offer = False
        self._head_size = self._size = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []

    # -- asyncio ------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if len(self._known) >= MAX_CONNECTIONS:
            self._transport.abort()
            return
        self._known.add(self)
        self._stranger = asyncio.get_running_loop().call_later(STRANGER_S, self.abort)

    def connection_lost(self, error: Exception | None) -> None:
        self._known.discard(self)
        self._writable.set()
        if self._stranger is not None:
            self._stranger.cancel()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if not self._headed:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offered:
            self._decline(data[offered.args[0] :])
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, RefusedError):
                self._refuse_and_close(error.__context__)
            else:
                self._refuse_and_close(RefusedError(400, "invalid_request", f"not HTTP/1.1: {error}"))
        else:
            if not self._headed and self._head_size > MAX_HEAD:
                self._refuse_and_close(_large_head())

    def _decline(self, rest: bytes) -> None:
        """Go on in HTTP/1.1 where the client offered another protocol, as RFC 9110 (7.8) allows.

        The parser takes such a request to end with its head, so it reads the head again without the offer.
        """
        closing = any(name == b"connection" and b"close" in value.lower() for name, value in self._headers)
        kept = [(name, value) for name, value in self._headers if name not in (b"connection", b"upgrade")]
        kept += [(b"connection", b"close")] if closing else []
        version = self._parser.get_http_version().encode("latin-1")
        head = b"%s %s HTTP/%s\r\n" % (self._parser.get_method(), self._url, version)
        self._begin()
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(head + b"".join(b"%s: %s\r\n" % one for one in kept) + b"\r\n" + rest)

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # -- httptools ----------------------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._headers.append((name, value))
        match name:
            case b"authorization":
                kind, _, token = value.decode("latin-1").partition(" ")
                if kind.lower() == "bearer":
                    self._token = token.strip()
            case b"x-api-key":
                self._token = value.decode("latin-1").strip()
            case b"x-stainless-retry-count":
                self._again = value.strip() not in (b"", b"0")
            case b"expect":
                self._expects = True

    def on_headers_complete(self) -> None:
        if len(self._url) + sum(len(name) + len(value) for name, value in self._headers) > MAX_HEAD:
            raise _large_head()
        if self._parser.should_upgrade():
            if self._parser.get_method() == b"CONNECT":
                raise RefusedError(405, "invalid_request", "this is no proxy")
            self._offer = True
            return
        self._headed = True
        self._opens = self._find(self._asked()[0]) is not None
        if self._opens and self._stranger is not None:
            self._stranger.cancel()
        if self._expects and not self._opens:
            raise unknown_key()
        if self._expects and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > MAX_BODY:
            raise RefusedError(413, "too_large", f"the body is larger than {MAX_BODY} bytes")
        if self._opens:  # a stranger's is read, so that its client gets to the answer, and not kept
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._offer:
            return
        token, path = self._asked()
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        method, keep = self._parser.get_method().decode("latin-1"), self._parser.should_keep_alive()
        self._waiting.append(_Request(method, path, token, self._again, body, keep))
        self._begin()
        if self._task is None:
            self._next()
        elif self._transport is not None:
            self._transport.pause_reading()

    def _asked(self) -> tuple[str, str]:
        """Token and route of the request, with a base URL's version or without."""
        token, path = self._token, self._url.partition(b"?")[0].decode("latin-1")
        if path.startswith(CAPABILITY):
            token, _, path = path.removeprefix(CAPABILITY).partition("/")
            path = f"/{path}"
        return token, path if path.startswith("/v1/") else f"/v1{path}"

    # -- answers ------------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        if not self._waiting or self._transport is None or self._transport.is_closing():
            self._task = None
            return
        self._task = asyncio.get_running_loop().create_task(self._answer(self._waiting.pop(0)))
        if not self._waiting:
            self._transport.resume_reading()

    async def _answer(self, request: _Request) -> None:
        path, keep = request.path, request.keep
        dialect, self._streaming = ROUTES.get(path), False
        shape = dialect or _PLAIN
        try:
            session = self._find(request.token)
            if session is None:
                raise unknown_key()
            if dialect is None:
                raise RefusedError(404, "not_found", f"there is no {path} here; {', '.join(ROUTES)} are")
            if request.method != "POST":
                raise RefusedError(405, "invalid_request", f"{path} takes POST alone")
            await self._exchange(session.ask(path, request.body, again=request.again), dialect, keep)
        except RefusedError as refused:
            self._send(refused.status, shape.error(refused), keep)
        except Exception:  # noqa: BLE001 - a fault of ours, or a request made to find one: the client gets an answer
            _log.exception("a request to %s broke", path)
            if self._streaming:
                self.abort()
            else:
                self._send(500, shape.error(RefusedError(500, "server", "the gateway broke")), keep)
        if not keep and self._transport is not None:
            self._transport.close()
        self._next()

    async def _exchange(self, exchange: Exchange, dialect: Dialect, keep: bool) -> None:
        exchange.waiting += 1
        try:
            if exchange.ask.stream:
                await self._stream(exchange, dialect)
            else:
                await asyncio.wait({exchange.task})
                self._send(200, dialect.write(exchange.ask, exchange.result()), keep)
            await self._writable.wait()
            exchange.delivered = self._transport is not None and not self._transport.is_closing()
        finally:
            exchange.waiting -= 1

    async def _stream(self, exchange: Exchange, dialect: Dialect) -> None:
        begun = False
        while not exchange.task.done():
            await asyncio.wait({exchange.task}, timeout=QUIET_S)
            if not exchange.task.done():
                self._write([dialect.ping], begin=not begun)
                begun = True
        try:
            answer = exchange.result()
        except RefusedError as refused:
            if not begun:
                raise
            self._write([dialect.error_event(refused)], begin=False, end=True)
            return
        self._write(dialect.events(exchange.ask, answer), begin=not begun, end=True)

    def _send(self, status: int, body: bytes, keep: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        connection = "" if keep else "Connection: close\r\n"
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\n{connection}"
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body)

    def _write(self, events: Iterator[bytes] | list[bytes], *, begin: bool, end: bool = False) -> None:
        """Events as chunks, in one write."""
        if self._transport is None or self._transport.is_closing():
            return
        parts = [
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        ] if begin else []  # fmt: skip
        for event in events:
            parts += (b"%x\r\n" % len(event), event, b"\r\n")
        self._streaming = True
        self._transport.write(b"".join([*parts, *([b"0\r\n\r\n"] if end else [])]))

    def _refuse_and_close(self, refused: RefusedError) -> None:
        if self._task is not None or self._transport is None:  # it would stand amid another request's answer
            self.abort()
            return
        self._send(refused.status, ROUTES.get(self._asked()[1], _PLAIN).error(refused), keep=False)
        self._transport.close()


def _large_head() -> RefusedError:
    return RefusedError(413, "too_large", f"the head is larger than {MAX_HEAD} bytes")
