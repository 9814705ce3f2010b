"""GET /v1/events: published lines as server-sent events, from a seq on, for as long as the client listens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import msgspec

from stages.router.core import Router

COMMENT_S: Final = 15.0
"""A silent stream says something so often: proxies close what is silent, and a reader that left is noticed."""
BATCH: Final = 256
RETRY: Final = b"retry: 1000\n\n"
"""Milliseconds after which a browser's EventSource connects again, with the last id that it has seen."""


class _Line(msgspec.Struct, frozen=True):
    type: str
    seq: int
    tag: str


_line = msgspec.json.Decoder(_Line)


async def stream(router: Router, after: int, tag: str | None, *, comment_s: float = COMMENT_S) -> AsyncIterator[bytes]:
    """Events `rows` and `group` with the seq as id; ends when the router leaves, and the client comes again."""
    yield RETRY
    publisher = router.publisher
    while not router.stopping:
        texts = await publisher.texts(after, BATCH)
        after += len(texts)
        if found := b"".join(_event(text) for text in texts if tag in {None, _line.decode(text).tag}):
            yield found
        elif not texts and not await publisher.wait_for_more(after, comment_s):
            yield b": still here\n\n"


def _event(text: bytes) -> bytes:
    line = _line.decode(text)
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (line.seq, line.type.encode(), text)
