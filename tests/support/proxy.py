"""A proxy between worker and router that drops, delays, repeats and cuts requests and answers, by a seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from stages.http import RouterLink

FAULTS = ("drop_request", "cut_request", "drop_answer", "cut_answer", "twice", "late", "late_twice")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class BadProxy:
    """Forwards HTTP/1.1 requests one by one to `target`; a share of them meets a fault."""

    def __init__(self, seed: int, share: float) -> None:
        self._draw, self._share = random.Random(f"proxy-{seed}"), share
        self.target, self.url = "", ""
        self.met: Counter[str] = Counter()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the worker's."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                request = await _message(reader)
                fault = self._draw.choice(FAULTS) if self._draw.random() < self._share else "none"
                self.met[fault] += 1
                answer = await self._forward(request, fault)
                writer.write(answer)
                await writer.drain()
                if fault in {"drop_request", "cut_request", "drop_answer", "cut_answer"}:
                    break
        writer.close()

    async def _forward(self, request: bytes, fault: str) -> bytes:
        """What the worker gets to see."""
        if fault == "drop_request":
            return b""
        if fault.startswith("late"):
            await asyncio.sleep(self._draw.uniform(0.05, 0.5))
        if fault == "cut_request":
            await self._ask(request[: len(request) * 2 // 3], cut=True)
            return b""
        if fault.endswith("twice"):
            await self._ask(request)
        answer = await self._ask(request)
        return {"drop_answer": b"", "cut_answer": answer[: len(answer) // 2]}.get(fault, answer)

    async def _ask(self, request: bytes, *, cut: bool = False) -> bytes:
        where = urlsplit(self.target)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        try:
            writer.write(request)
            await writer.drain()
            return b"" if cut else await _message(reader)
        finally:
            writer.close()


async def _message(reader: asyncio.StreamReader) -> bytes:
    """One request or answer with its body; bodies here have a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    return head + (await reader.readexactly(int(length[1])) if length else b"")


class ProxiedLink(RouterLink):
    """A worker's link whose every request goes through the proxy."""

    proxy: BadProxy

    async def locate(self) -> None:
        """Where the router is; and the proxy is told."""
        await super().locate()
        self.proxy.target, self._url = str(self._url), self.proxy.url


@contextlib.asynccontextmanager
async def proxied(seed: int, share: float) -> AsyncIterator[BadProxy]:
    """A listening proxy."""
    proxy = BadProxy(seed, share)
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    proxy.url = f"http://{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
