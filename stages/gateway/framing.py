"""Answers and streams of events as HTTP/1.1 writes them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_REASONS: Final = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found",
    405: b"Method Not Allowed", 413: b"Content Too Large", 429: b"Too Many Requests", 500: b"Internal Server Error",
    503: b"Service Unavailable",
}  # fmt: skip
_SOON: Final = b"Retry-After: 1\r\n"
_JSON: Final = b"HTTP/1.1 %d %s\r\nContent-Type: application/json\r\n%s%sContent-Length: %d\r\n\r\n%s"
_EVENTS: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def whole(status: int, body: bytes, *, keep: bool) -> bytes:
    """An answer with its body; the connection stays where `keep` says so."""
    soon, close = _SOON if status in (429, 503) else b"", b"" if keep else b"Connection: close\r\n"
    return _JSON % (status, _REASONS[status], soon, close, len(body), body)


def chunks(events: Iterable[bytes], *, begin: bool, end: bool) -> bytes:
    """Events of a stream, each a chunk; its head before them where it begins, and its end behind them where it ends."""
    parts = [_EVENTS] if begin else []
    for event in events:
        parts += (b"%x\r\n" % len(event), event, b"\r\n")
    if end:
        parts.append(b"0\r\n\r\n")
    return b"".join(parts)
