"""The gateway's HTTP server: httptools on asyncio's own protocols, for requests of up to 64 KB at thousands a second.

A framework costs ten times what an answer does here, and what is served is small: five routes, one body in, one answer
or one stream of events out. One request of a connection is answered at a time; what a client sends
before it has its answer waits in the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, cast

import httptools
import msgspec

from stages.gateway.asks import Dialect
from stages.gateway.errors import RefusedError
from stages.gateway.session import ROUTES, CaptureSession, Exchange
from stages.model import StreamModel

MAX_BODY: Final = 64 * 1024 * 1024
MAX_HEAD: Final = 64 * 1024
QUIET_S: Final = 5.0
"""A stream begins at the latest after so long, and says something as often; before that an error has its own status."""
_REASONS: Final = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    413: "Content Too Large", 500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip
_CAPABILITY: Final = "/cap/"


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


@contextlib.asynccontextmanager
async def outside(model: StreamModel, *, max_turns: int, host: str = "127.0.0.1") -> AsyncIterator[Outside]:
    """A gateway for an agent that runs in no sandbox: on an interface of this node, under a capability path.

    Args:
        model: of the attempt.
        max_turns: answers at most.
        host: an address of this node; whoever reaches it and knows the path can ask the policy while the block runs.
    """
    session = CaptureSession(model, max_turns=max_turns)
    async with GatewayServer() as server, opened(server, session):
        sock = socket.create_server((host, 0))
        sock.setblocking(False)
        port = await server.listen(sock)
        yield Outside(f"http://{host}:{port}{_CAPABILITY}{session.token}", session)


class Outside(msgspec.Struct, frozen=True):
    """Where an agent outside finds the policy: OpenAI's base URL is `url` + "/v1", Anthropic's is `url`; no key."""

    url: str
    session: CaptureSession


class _Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, find: Callable[[str], CaptureSession | None], known: set[_Connection]) -> None:
        self._find, self._known = find, known
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: list[tuple[str, str, str, bool, bytes, bool]] = []
        self._writable = asyncio.Event()
        self._writable.set()
        self._begin()

    def _begin(self) -> None:
        self._url, self._token, self._again, self._expects = b"", "", False, False
        self._head_size = self._size = 0
        self._body: list[bytes] = []

    # -- asyncio ------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._known.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._known.discard(self)
        self._writable.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, RefusedError):
                self._refuse_and_close(error.__context__)
            else:
                self._refuse_and_close(RefusedError(400, "invalid_request", f"not HTTP/1.1: {error}"))

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # -- httptools ----------------------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value)
        if self._head_size > MAX_HEAD:
            raise RefusedError(413, "too_large", f"the head is larger than {MAX_HEAD} bytes")
        match name.lower():
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
        if self._expects and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > MAX_BODY:
            raise RefusedError(413, "too_large", f"the body is larger than {MAX_BODY} bytes")
        self._body.append(body)

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode("latin-1")
        path = self._url.partition(b"?")[0].decode("latin-1")
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._waiting.append((method, path, self._token, self._again, body, self._parser.should_keep_alive()))
        self._begin()
        if self._task is None:
            self._next()
        elif self._transport is not None:
            self._transport.pause_reading()

    # -- answers ------------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        if not self._waiting or self._transport is None or self._transport.is_closing():
            self._task = None
            return
        self._task = asyncio.get_running_loop().create_task(self._answer(*self._waiting.pop(0)))
        if not self._waiting:
            self._transport.resume_reading()

    async def _answer(self, method: str, path: str, token: str, again: bool, body: bytes, keep: bool) -> None:
        if path.startswith(_CAPABILITY):
            token, _, path = path.removeprefix(_CAPABILITY).partition("/")
            path = f"/{path}"
        path = path if path.startswith("/v1/") else f"/v1{path}"  # a base URL with or without its version
        dialect = ROUTES.get(path)
        try:
            session = self._find(token)
            if session is None:
                raise RefusedError(401, "authentication", "this key opens nothing, or its session is over")
            if dialect is None:
                raise RefusedError(404, "not_found", f"there is no {path} here; {', '.join(ROUTES)} are")
            if method != "POST":
                raise RefusedError(405, "invalid_request", f"{path} takes POST alone")
            await self._exchange(session.ask(path, body, again=again), dialect, keep)
        except RefusedError as refused:
            self._send(refused.status, (dialect or ROUTES["/v1/chat/completions"]).error(refused), keep)
        self._next()

    async def _exchange(self, exchange: Exchange, dialect: Dialect, keep: bool) -> None:
        exchange.waiting += 1
        try:
            if exchange.ask.stream:
                await self._stream(exchange, dialect, keep)
            else:
                answer = await asyncio.shield(exchange.task)
                self._send(200, dialect.write(exchange.ask, answer), keep)
            await self._writable.wait()
            exchange.delivered = self._transport is not None and not self._transport.is_closing()
        finally:
            exchange.waiting -= 1

    async def _stream(self, exchange: Exchange, dialect: Dialect, keep: bool) -> None:
        begun = False
        while not exchange.task.done():
            await asyncio.wait({exchange.task}, timeout=QUIET_S)
            if not exchange.task.done():
                self._write([dialect.ping], begin=not begun)
                begun = True
        try:
            answer = await exchange.task
        except RefusedError as refused:
            if not begun:
                raise
            self._write([dialect.error_event(refused)], begin=False, end=True)
            return
        self._write(dialect.events(exchange.ask, answer), begin=not begun, end=True)
        if not keep and self._transport is not None:
            self._transport.close()

    def _send(self, status: int, body: bytes, keep: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        connection = "" if keep else "Connection: close\r\n"
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\n{connection}"
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body)
        if not keep:
            self._transport.close()

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
        self._transport.write(b"".join([*parts, *([b"0\r\n\r\n"] if end else [])]))

    def _refuse_and_close(self, refused: RefusedError) -> None:
        self._send(refused.status, ROUTES["/v1/chat/completions"].error(refused), keep=False)
