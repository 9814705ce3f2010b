"""The gateway's HTTP server: httptools on asyncio's own protocols, for requests of up to 64 KB at thousands a second.

A framework costs ten times what an answer does here, and what is served is small: five routes, one body in, one answer
or one stream of events out. One request of a connection is answered at a time; what a client sends
before it has its answer waits in the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, cast

import httptools

from stages.gateway.answering import Request, answer, error_body
from stages.gateway.bodies import Hold, Share
from stages.gateway.errors import Kind, RefusedError, unknown_key
from stages.gateway.framing import whole
from stages.gateway.session import CaptureSession

MAX_BODY: Final = 4 * 1024 * 1024
"""Of a request: some times what the longest contexts hold. Larger ones cost the worker minutes of encoding."""
MAX_HEAD: Final = 64 * 1024
MAX_CONNECTIONS: Final = 512
STRANGER_S: Final = 30.0
"""Seconds until a connection must have shown a capability once."""
BODY_S: Final = 60.0
"""Seconds for a body to come: the time that it waits for room is part of them."""
CAPABILITY: Final = "/cap/"
"""Before a token in the path of a request."""


class GatewayServer:
    """Serves sessions on sockets; a session is found by its token, in the key of a request or in its path."""

    def __init__(self) -> None:
        self._sessions: dict[str, CaptureSession] = {}
        self._servers: list[asyncio.Server] = []
        self._connections: set[_Connection] = set()
        self._share = Share()

    async def listen(self, sock: socket.socket) -> int:
        """Serve on a socket, which is the server's from now on; its port."""
        port = int(sock.getsockname()[1])
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(self._find, self._connections, self._share), sock=sock)
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


class _Connection(asyncio.Protocol):
    """One client's connection; `known` are all of the server's, whose bodies have one share."""

    def __init__(self, find: Callable[[str], CaptureSession | None], known: set[_Connection], share: Share) -> None:
        self._find, self._known, self._share = find, known, share
        self._parser: Any = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: list[Request] = []
        self._stranger: asyncio.TimerHandle | None = None
        self._late: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._begin()

    def _begin(self) -> None:
        self._url, self._token, self._again, self._expects = b"", "", False, False
        self._headed = self._opens = self._offer = False
        self._head_size = self._size = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._hold = Hold(self._share)
        self._refused: RefusedError | None = None

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
        self._came()
        self._hold.free()
        for request in self._waiting:
            request.over()
        self._waiting.clear()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        rest = self._read(memoryview(data))
        while rest is not None:
            self._read(memoryview(self._without_offer()))
            rest = None if self.closing else self._read(rest)

    def _read(self, data: memoryview) -> memoryview | None:
        """Parse; what follows the head of a request that offers another protocol, else None."""
        if not self._headed:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offered:
            return data[offered.args[0] :]
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, RefusedError):
                self._refuse_and_close(error.__context__)
            else:
                self._refuse_and_close(RefusedError(400, "invalid_request", f"not HTTP/1.1: {error}"))
        else:
            if not self._headed and self._head_size > MAX_HEAD:
                self._refuse_and_close(_large_head())
            elif self._hold.size and self._transport is not None and not self._transport.is_closing():
                self._share.pool.wait(self._transport)
                if self._late is None:
                    self._late = asyncio.get_running_loop().call_later(BODY_S, self._overdue)
        return None

    def _without_offer(self) -> bytes:
        """The head of a request whose client offered another protocol, to go on in HTTP/1.1 as RFC 9110 (7.8) allows.

        The parser takes such a request to end with its head, so a new one reads it again without the offer.
        """
        closing = any(name == b"connection" and b"close" in value.lower() for name, value in self._headers)
        kept = [(name, value) for name, value in self._headers if name not in (b"connection", b"upgrade")]
        kept += [(b"connection", b"close")] if closing else []
        version = self._parser.get_http_version().encode("latin-1")
        head = b"%s %s HTTP/%s\r\n" % (self._parser.get_method(), self._url, version)
        self._begin()
        self._parser = httptools.HttpRequestParser(self)
        return head + b"".join(b"%s: %s\r\n" % one for one in kept) + b"\r\n"

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
        if not self._opens or self._refused is not None:  # read, so that its client gets to the answer, and not kept
            return
        if self._hold.grow(len(body)):
            self._body.append(body)
        else:
            self._drop(429, "rate_limit")

    def _overdue(self) -> None:
        """The body did not come in time: where others held it up, that is no doing of its client."""
        session = self._find(self._asked()[0])
        if session is not None and self._transport is not None and self._share.pool.holds_up(self._transport):
            session.fail("no room for a request's body: other attempts' requests fill the worker")
        self._drop(503, "overloaded")

    def _drop(self, status: int, kind: Kind) -> None:
        """Keep nothing of a body that is coming; its request is refused once it is over."""
        held = self._share.held
        self._refused = RefusedError(
            status, kind, f"requests of {held} bytes together are being read or answered: try again when some are done"
        )
        self._hold.free()
        self._body.clear()
        self._came()

    def _came(self) -> None:
        """No more of the body is waited for."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if self._transport is not None:
            self._share.pool.leave(self._transport)

    def on_message_complete(self) -> None:
        if self._offer:
            return
        self._came()
        token, path = self._asked()
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        method, keep = self._parser.get_method().decode("latin-1"), self._parser.should_keep_alive()
        self._waiting.append(Request(method, path, token, self._again, body, keep, self._hold, self._refused))
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
        request = self._waiting.pop(0)
        self._task = asyncio.get_running_loop().create_task(self._answer(request))
        self._task.add_done_callback(lambda _: request.over())
        if not self._waiting:
            self._transport.resume_reading()

    async def _answer(self, request: Request) -> None:
        await answer(request, self._find, self)
        if not request.keep and self._transport is not None:
            self._transport.close()
        self._next()

    @property
    def closing(self) -> bool:
        """See Channel."""
        return self._transport is None or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """See Channel."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    async def drained(self) -> None:
        """See Channel."""
        await self._writable.wait()

    def _refuse_and_close(self, refused: RefusedError) -> None:
        if self._task is not None or self._transport is None:  # it would stand amid another request's answer
            self.abort()
            return
        self.write(whole(refused.status, error_body(self._asked()[1], refused), keep=False))
        self._transport.close()


def _large_head() -> RefusedError:
    return RefusedError(413, "too_large", f"the head is larger than {MAX_HEAD} bytes")
