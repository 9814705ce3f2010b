"""Finding the router again: one that was stopped keeps its connections open and answers nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import stages.http
from stages import beacon
from stages.beacon import Beacon
from stages.http import RouterLink
from stages.layout import RunLayout
from tests.support.routers import make_run


async def serve(answer: bytes | None) -> tuple[asyncio.Server, str]:
    """A server that answers every request with `answer`, or never."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await asyncio.Event().wait()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_request_that_hangs_moves_to_the_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.http, "LOOK_S", 0.05)
    layout: RunLayout = make_run(tmp_path / "run")
    stopped, old = await serve(None)
    alive, new = await serve(b'{"status":"ok"}')
    beacon.write(layout, Beacon(1, old, "here", 1))
    async with RouterLink("trainer", run_dir=layout.root, patience_s=20) as link:
        asking = asyncio.create_task(link.call("GET", "/healthz", answer=dict[str, str], timeout_s=60))
        await asyncio.sleep(0.3)
        assert not asking.done()
        beacon.write(layout, Beacon(2, new, "here", 2))
        assert await asyncio.wait_for(asking, 10) == {"status": "ok"}
        assert link.epoch == 2
    stopped.close()
    alive.close()
