"""An HTTP client for many short requests to few hosts: connections that are kept, deadlines, and no surprises.

No redirects, no cookies, no proxies out of the environment: whom a URL names is who is asked. The responses are
whole, but for streams of events that their caller hears as they come. https:// is spoken where a URL says so; the
certificates, which take 0.15 s to read, are read then.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote

from stages.connection import ANSWER_BYTES, ConnectError, Connection, ReadError, RequestTimeout, Response
from stages.errors import StageError

if TYPE_CHECKING:
    import ssl

KEEP_ALIVE_S: Final = 4.0
"""Below the servers' own, so that no request is sent into a connection that is being closed."""
CONNECT_S: Final = 30.0
"""Most seconds for a connection, whatever time the request has."""
_ORIGIN: Final = re.compile(r"(https?)://(\[[0-9a-fA-F:.%\w]+\]|[^/?#@:\[\]\\\s]+)(?::(\d{1,5}))?", re.IGNORECASE)
_PLAIN: Final = re.compile(r"[!-~]*")
Content = bytes | tuple[bytes, ...]
_METHOD: Final = re.compile(r"[A-Z]+")
_SAFE: Final = "%/:=&?~#+!$,;'@()*[]"
_REPEATED: Final = frozenset({"GET"})
"""Sent once more where a kept connection turns out to be closed: these change nothing."""


class InvalidURL(StageError):
    """Not an http:// or https:// URL with a host; nothing was sent."""


class Origin(NamedTuple):
    """Whom a URL names."""

    tls: bool
    host: str
    port: int
    named: str
    """As the Host header says it."""


def split_url(url: str) -> tuple[Origin, str]:
    """Whom to ask, and for what.

    Raises:
        InvalidURL: names no host, or names a user.
    """
    end = url.find("/", 8)
    if end < 0:
        end = len(url)
        for mark in "?#":
            end = min(end, url.find(mark) % (end + 1) if mark in url else end)
    origin, target = _origin(url[:end]), url[end:]
    if "#" in target:
        target = target[: target.index("#")]
    if not _PLAIN.fullmatch(target):
        target = quote(target, safe=_SAFE)
    return origin, target if target.startswith("/") else f"/{target}"


@functools.lru_cache(maxsize=1024)
def _origin(text: str) -> Origin:
    found = _ORIGIN.fullmatch(text)
    if found is None:
        raise InvalidURL(f"{text[:200]!r} is no URL of the form http://HOST[:PORT] or https://HOST[:PORT]")
    tls, host, port = found[1].lower() == "https", found[2].strip("[]"), int(found[3] or 0)
    if port > 65535:
        raise InvalidURL(f"{text[:200]!r}: there is no port {port}")
    try:
        named = found[2] if found[2].isascii() else host.encode("idna").decode()
    except UnicodeError as error:
        raise InvalidURL(f"{text[:200]!r}: {host!r} is no host's name") from error
    return Origin(tls, host, port or (443 if tls else 80), f"{named}:{found[3]}" if found[3] else named)


class Client:
    """See the module; belongs to one event loop, closed by `aclose` or as a context manager.

    Args:
        connections: most requests at once, and most connections; further ones wait for their turn.
        timeout_s: seconds for a request that names none: connection, turn and whole answer together.
        answer_bytes: most bytes of an answer.
    """

    def __init__(self, *, connections: int = 256, timeout_s: float = 60.0, answer_bytes: int = ANSWER_BYTES) -> None:
        self._most, self._timeout_s, self._answer_bytes = connections, timeout_s, answer_bytes
        self._turns = asyncio.Semaphore(connections)
        self._open: dict[Connection, Origin] = {}
        self._idle: dict[Origin, dict[Connection, None]] = {}
        self._context: asyncio.Task[ssl.SSLContext] | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def get(
        self, url: str, *, headers: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> Response:
        """A GET; see `request`."""
        return await self.request("GET", url, headers=headers, timeout=timeout)

    async def post(
        self,
        url: str,
        *,
        content: Content = b"",
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        hear: Callable[[bytes], None] | None = None,
    ) -> Response:
        """A POST; see `request`."""
        return await self.request("POST", url, content=content, headers=headers, timeout=timeout, hear=hear)

    async def request(
        self,
        method: str,
        url: str,
        *,
        content: Content | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        hear: Callable[[bytes], None] | None = None,
    ) -> Response:
        """One request and its whole response, whatever its status.

        Args:
            method: not HEAD, whose answers lie about their length.
            url: of an origin and a path; what is no plain ASCII in the path is percent-encoded.
            content: the body, or the parts of a large one; None where there is none.
            headers: further fields; Host, Content-Length and Accept-Encoding are ours.
            timeout: seconds for all of it; None: the client's.
            hear: gets a stream of events (a 200 that says to be one) as it comes, in place of the response's content;
                it may not raise.

        Raises:
            InvalidURL: the URL names nobody.
            ConnectError: no connection in time; nothing was sent.
            RequestTimeout: no whole answer in time.
            ReadError: the connection broke.
            AnswerError: the answer cannot be read.
            ValueError: a method or header that cannot be sent.
        """
        origin, target = split_url(url)
        parts = (content,) if isinstance(content, bytes) else content
        head = _head(method, target, origin.named, headers, None if parts is None else sum(map(len, parts)))
        data = [head] if parts is None else [head, *parts]
        limit_s = self._timeout_s if timeout is None else timeout
        until = asyncio.get_running_loop().time() + limit_s
        sent = False
        try:
            await self._take_turn(until)
            try:
                while True:
                    connection = self._kept(origin)
                    kept = connection is not None
                    if connection is None:
                        connection = await self._connect(origin, until)
                    sent = True
                    try:
                        response = await connection.exchange(data, until, hear)
                    except ReadError:
                        if kept and not connection.began and method in _REPEATED:
                            continue
                        raise
                    if connection.usable and not self._closed:
                        self._keep(origin, connection)
                    return response
            finally:
                self._turns.release()
        except TimeoutError as error:
            if sent:
                raise RequestTimeout(f"{url}: no whole answer within {limit_s:g} s") from error
            raise ConnectError(f"{url}: no connection within {limit_s:g} s") from error

    async def _take_turn(self, until: float) -> None:
        if self._turns.locked():
            async with asyncio.timeout_at(until):
                await self._turns.acquire()
        else:
            await self._turns.acquire()  # at once

    async def aclose(self) -> None:
        """End every connection; requests in flight fail."""
        self._closed = True
        for connection in list(self._open):
            connection.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._context is not None:
            self._context.cancel()
        await asyncio.sleep(0)  # asyncio tells connections of their end in the loop's next turn
        self._idle.clear()

    def _keep(self, origin: Origin, connection: Connection) -> None:
        self._idle.setdefault(origin, {})[connection] = None
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._sweep)

    def _sweep(self) -> None:
        """Let go what was idle too long: a burst must not hold a server's descriptors until that gives them up."""
        self._sweeping = None
        oldest = time.monotonic() - KEEP_ALIVE_S
        for idle in self._idle.values():
            for connection in [one for one in idle if one.idle_since <= oldest]:
                connection.close()  # which ends up in `_lost`, in the loop's next turn
                del idle[connection]
        if any(self._idle.values()):
            self._sweeping = asyncio.get_running_loop().call_later(KEEP_ALIVE_S / 2, self._sweep)

    def _kept(self, origin: Origin) -> Connection | None:
        """The connection used last, if it is fresh enough; older ones are let go."""
        idle = self._idle.get(origin)
        oldest = time.monotonic() - KEEP_ALIVE_S
        while idle:
            connection, _ = idle.popitem()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    async def _connect(self, origin: Origin, until: float) -> Connection:
        if self._closed:
            raise ConnectError(f"{origin.named}: this client is closed")
        if len(self._open) >= self._most:
            self._let_oldest_go()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(until, loop.time() + CONNECT_S)):
                context = await self._certificates() if origin.tls else None
                _, connection = await loop.create_connection(
                    lambda: Connection(self._lost, self._answer_bytes), origin.host, origin.port,
                    ssl=context, server_hostname=origin.host if context else None,
                )  # fmt: skip
        except (OSError, UnicodeError) as error:  # TLS's errors are OSErrors too
            raise ConnectError(f"{origin.named}: {error or type(error).__name__}") from error
        self._open[connection] = origin
        return connection

    def _let_oldest_go(self) -> None:
        kept = [connection for idle in self._idle.values() for connection in idle]
        if kept:
            oldest = min(kept, key=lambda connection: connection.idle_since)
            self._lost(oldest)
            oldest.close()

    def _lost(self, connection: Connection) -> None:
        origin = self._open.pop(connection, None)
        if origin is not None and (idle := self._idle.get(origin)) is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[origin]

    async def _certificates(self) -> ssl.SSLContext:
        """The system's certificates, read once, in a thread."""
        if self._context is None or (self._context.done() and (self._context.cancelled() or self._context.exception())):
            self._context = asyncio.create_task(asyncio.to_thread(_context), name="certificates")
        return await asyncio.shield(self._context)


def _context() -> ssl.SSLContext:
    import ssl

    return ssl.create_default_context()


def _head(method: str, target: str, host: str, headers: Mapping[str, str] | None, size: int | None) -> bytes:
    """A request up to its body of so many bytes."""
    if not _METHOD.fullmatch(method) or method == "HEAD":
        raise ValueError(f"the method {method!r} cannot be sent")
    lines = [f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity"]
    if size is not None:
        lines.append(f"Content-Length: {size}")
    for name, value in (headers or {}).items():
        if "\r" in value or "\n" in value or "\0" in value or not name.isascii() or not name.replace("-", "").isalnum():
            raise ValueError(f"the header field {name!r} cannot be sent: it holds a line's end, or its name is none")
        lines.append(f"{name}: {value}")
    lines.append("\r\n")
    return "\r\n".join(lines).encode("latin-1")
