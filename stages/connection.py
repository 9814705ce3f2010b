"""One HTTP/1.1 connection of a client: a request out, its whole response in, parsed by httptools and bounded.

The protocol is spoken here and not by a client library because every process of a run has to import what speaks it
(0.25 s of CPU for httpx over aiohttp, 0.9 s where nothing is compiled yet; 0.03 s for httptools), and because four
calls of every rollout go through it.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from typing import Any, Final, cast

import httptools
import msgspec

from stages.errors import StageError

HEAD_BYTES: Final = 256 * 1024
"""Most bytes before a response's body."""
ANSWER_BYTES: Final = 256 << 20
"""Most bytes of a response's body, as it comes and as it is decoded."""
_ENCODINGS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Content encoding -> zlib's window bits."""


class TransportError(StageError):
    """A request got no whole answer: no connection, or it broke, or what came is no HTTP."""


class ConnectError(TransportError):
    """There is no connection: nothing was sent."""


class ReadError(TransportError):
    """The connection broke before the whole answer was there: the request may have been carried out."""


class RequestTimeout(TransportError):
    """The whole answer was not there in time: the request may have been carried out."""


class AnswerError(TransportError):
    """What came is no HTTP, is too large, or is encoded as nobody asked for."""


class Headers(dict[str, str]):
    """Header fields by their names in small letters; any spelling finds them. A repeated field is joined by commas."""

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())

    def get(self, name: str, default: Any = None) -> Any:
        """The field's value, or the default."""
        return super().get(name.lower(), default)


class Response:
    """A whole response."""

    __slots__ = ("content", "headers", "reason_phrase", "status_code")

    def __init__(self, status_code: int, reason_phrase: str, headers: Headers, content: bytes) -> None:
        self.status_code, self.reason_phrase = status_code, reason_phrase
        self.headers, self.content = headers, content

    @property
    def text(self) -> str:
        """The body as UTF-8, whatever it says that it is."""
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body's JSON.

        Raises:
            msgspec.DecodeError: it is none.
        """
        return msgspec.json.decode(self.content)


class Connection(asyncio.Protocol):
    """A connection that carries one exchange after the other; `lost` is told when it has ended."""

    def __init__(self, lost: Callable[[Connection], None], answer_bytes: int = ANSWER_BYTES) -> None:
        self._lost, self._answer_bytes = lost, answer_bytes
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer: asyncio.Future[Response] | None = None
        self._hear: Callable[[bytes], None] | None = None
        self.idle_since = 0.0
        self.began = False
        """Whether any byte of the present answer has come."""
        self._reset()

    def _reset(self) -> None:
        self._headers, self._reason, self._status = Headers(), b"", 0
        self._parts: list[bytes] = []
        self._size = self._head_size = 0
        self._headed = self._reusable = self._streams = False

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        transport = self._transport
        return self._answer is None and transport is not None and not transport.is_closing()

    async def exchange(
        self, request: list[bytes], until: float, hear: Callable[[bytes], None] | None = None
    ) -> Response:
        """Send a request and wait for its response; cancelled or failed, the connection is of no more use.

        Args:
            request: all of its bytes, in parts that are not joined here: a long prompt is copied by the system alone.
            until: the loop's time when the whole response must be there.
            hear: gets the body of a stream of events as it comes, in place of the response; it may not raise.

        Raises:
            TimeoutError: it was not.
            ReadError: it broke.
            AnswerError: the answer is none that can be read.
        """
        assert self._transport is not None and self._answer is None
        self._reset()
        self.began, self._hear = False, hear
        self._parser = httptools.HttpResponseParser(self)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Response] = loop.create_future()
        self._answer = answer
        self._transport.writelines(request)
        # A timer that fails the answer: a third of what asyncio.timeout costs, which would cancel the task.
        timer = loop.call_at(until, _expire, answer)
        try:
            return await answer
        except BaseException:  # late, cancelled, broken or unreadable: raised again
            self.close()
            raise
        finally:
            timer.cancel()
            self._answer = self._hear = None
            self.idle_since = time.monotonic()

    def close(self) -> None:
        """End it at once; what was to be sent is not."""
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._parser is None:  # nobody asked
            self.close()
            return
        self.began = True
        if not self._headed:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(AnswerError(f"the answer is no HTTP: {error or type(error).__name__}"))
            return
        if not self._headed and self._head_size > HEAD_BYTES:
            self._fail(AnswerError(f"the answer's head is larger than {HEAD_BYTES} bytes"))
        elif self._size > self._answer_bytes:
            self._fail(AnswerError(f"the answer is larger than {self._answer_bytes} bytes"))

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        # A body without a length ends with its connection.
        framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        if error is None and self._parser is not None and self._headed and not framed:
            self._finish()
        when = "in the middle of its answer" if self.began else "before its answer"
        self._fail(ReadError(f"the server closed the connection {when}" + (f": {error}" if error else "")))
        self._lost(self)

    # -- httptools' callbacks -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """The next response; one that follows the one that was asked for is nobody's."""
        if self._parser is None:
            self.close()

    def on_status(self, reason: bytes) -> None:
        """A piece of the reason phrase."""
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """One whole header field."""
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        """The body comes next."""
        if self._parser is None:
            return
        self._status = self._parser.get_status_code()
        self._reusable = self._parser.should_keep_alive()
        self._headed = self._status >= 200
        if self._hear is not None and self._status == 200:
            kind, encoding = self._headers.get("content-type", ""), self._headers.get("content-encoding", "identity")
            self._streams = kind.startswith("text/event-stream") and encoding == "identity"

    def on_body(self, part: bytes) -> None:
        """A piece of the body."""
        self._size += len(part)
        if self._streams and self._hear is not None:
            self._hear(part)
        elif self._size <= self._answer_bytes:
            self._parts.append(part)

    def on_message_complete(self) -> None:
        """All of it is there."""
        if self._headed:
            self._finish()
        else:  # 1xx: the response itself is still to come
            self._reset()

    def _finish(self) -> None:
        self._parser = None
        if self._size > self._answer_bytes or self._answer is None or self._answer.done():
            return  # the caller of the parser says that it is too large, or nobody waits
        parts = self._parts
        try:
            content = self._decoded(parts[0] if len(parts) == 1 else b"".join(parts))
        except AnswerError as error:
            self._fail(error)
            return
        response = Response(self._status, self._reason.decode("latin-1"), self._headers, content)
        self._headers = Headers()
        self._answer.set_result(response)
        # What is still being sent belongs to a request that was answered before it was read.
        if self._transport is not None and (not self._reusable or self._transport.get_write_buffer_size()):
            self._transport.abort()

    def _decoded(self, content: bytes) -> bytes:
        encoding = self._headers.get("content-encoding", "identity").strip().lower()
        if encoding == "identity" or not content:
            return content
        if encoding not in _ENCODINGS:
            raise AnswerError(f"the answer is encoded as {encoding[:50]!r}, which was not asked for")
        decoder = zlib.decompressobj(_ENCODINGS[encoding])
        try:
            decoded = decoder.decompress(content, self._answer_bytes)
        except zlib.error as error:
            raise AnswerError(f"the answer's {encoding} does not decode: {error}") from error
        if not decoder.eof:
            raise AnswerError(f"the answer's {encoding} is torn, or larger than {self._answer_bytes} bytes decoded")
        return decoded

    def _fail(self, error: TransportError) -> None:
        self._parser = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.close()


def _expire(answer: asyncio.Future[Response]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())
