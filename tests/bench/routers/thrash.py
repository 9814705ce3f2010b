"""Long conversations on a fleet of which one replica has hardly any room for them: how long until all have ended.

The first replica holds 6,000 tokens of keys and values, the seven others 200,000; 400 sessions of ten turns, 64 at a
time, begin with 8 KB and grow by 1 KB a turn. What a replica has not kept it computes again, one prompt at a time.
A router beside ours is asked for what it gives: the same sessions, named in each request as it wants them named.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from stages import beacon
from stages.client import AsyncRolloutClient
from stages.http import RouterLink
from stages.layout import RunLayout
from tests.support.mock_engine import MockEngine
from tests.support.routers import HandWorker
from tests.support.waiting import poll

HOLDS = (6_000, *[200_000] * 7)
"""Tokens of each replica."""
SESSIONS, LIVE, TURNS = 400, 64, 10
FIRST_BYTES, MORE_BYTES, TOKEN_BYTES = 8192, 1024, 4
PREFILL_S, TURN_S = 20e-6, 0.02
"""A token that is not in the cache, one prompt at a time; and what every turn takes besides, many at a time."""
PEERS = ("vllm-router",)

Ask = Callable[[str, bytes], Awaitable[None]]


class KvEngine(MockEngine):
    """A replica that keeps prefixes of sessions while there is room, the longest unused go first.

    Args:
        holds: tokens for which it has room; a prompt that does not fit beside those that run waits, first come first.
    """

    def __init__(self, holds: int) -> None:
        super().__init__()
        self._holds, self._used = holds, 0
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._compute, self._room = asyncio.Lock(), asyncio.Condition()
        self.computed, self.prompts = 0, 0
        self.sessions: set[str] = set()

    async def answer(self, method: str, target: str, body: bytes) -> tuple[int, Any]:
        if target != "/v1/completions":
            return await super().answer(method, target, body)
        asked = json.loads(body)
        session, tokens = str(asked["session_params"]["session_id"]), len(asked["prompt"]) // TOKEN_BYTES
        self.sessions.add(session)
        self._gauge("num_requests_waiting", 1)
        async with self._room:
            await self._room.wait_for(lambda: self._used + tokens <= self._holds)
            self._used += tokens
        self._gauge("num_requests_waiting", -1)
        self._gauge("num_requests_running", 1)
        self._show_use()
        try:
            missing = tokens - min(tokens, self._kept.pop(session, 0))
            self._make_room(tokens)
            self.computed, self.prompts = self.computed + missing, self.prompts + tokens
            async with self._compute:
                await asyncio.sleep(missing * PREFILL_S)
            await asyncio.sleep(TURN_S)
        finally:
            async with self._room:
                self._used -= tokens
                self._kept[session] = tokens
                self._make_room(0)
                self._room.notify_all()
            self._gauge("num_requests_running", -1)
            self._show_use()
        return 200, {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "m",
                     "choices": [{"index": 0, "text": "x", "finish_reason": "stop", "logprobs": None}]}  # fmt: skip

    def _make_room(self, tokens: int) -> None:
        while self._kept and sum(self._kept.values()) + self._used > self._holds:
            self._kept.popitem(last=False)

    def _gauge(self, name: str, change: int) -> None:
        self.gauges[name] += change

    def _show_use(self) -> None:
        self.gauges["kv_cache_usage_perc"] = self._used / self._holds


class Connections:
    """Requests of one session: a connection each to whatever address it is sent to."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def ask(self, url: str, session: str, body: bytes) -> None:
        port = int(url.rpartition(":")[2])
        if port not in self._open:
            self._open[port] = await asyncio.open_connection("127.0.0.1", port)
        reader, writer = self._open[port]
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: e\r\nContent-Type: application/json\r\nX-Session-ID: {session}\r\n"
        )
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        said = await reader.readexactly(length)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{answer.partition(bytes([13]))[0].decode()}: {said[:200].decode(errors='replace')}")

    def close(self) -> None:
        for _, writer in self._open.values():
            writer.close()


async def conversation(session: str, url: str) -> None:
    """Its turns, one after the other."""
    connections = Connections()
    try:
        for turn in range(TURNS):
            size = FIRST_BYTES + turn * MORE_BYTES
            prompt = f"{session} ".ljust(size, "x")
            asked = {"model": "m", "prompt": prompt, "max_tokens": 1, "session_params": {"session_id": session}}
            await connections.ask(url, session, json.dumps(asked).encode())
    finally:
        connections.close()


@contextlib.asynccontextmanager
async def engines() -> AsyncIterator[list[KvEngine]]:
    """A fleet that nobody has asked for anything."""
    async with contextlib.AsyncExitStack() as stack:
        made = [KvEngine(holds) for holds in HOLDS]
        for one in made:
            await stack.enter_async_context(one)
        yield made


async def through(run: Callable[[int], Awaitable[None]], fleet: list[KvEngine], sessions: int) -> dict[str, float]:
    """All sessions, LIVE at a time; `run` is one of them by its number."""
    numbers = iter(range(sessions))

    async def one_after_the_other() -> None:
        for number in numbers:
            await run(number)

    started = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(LIVE)))
    wall_s = time.perf_counter() - started
    computed, prompts = sum(one.computed for one in fleet), sum(one.prompts for one in fleet)
    return {"s": wall_s, "hits": 1 - computed / prompts, "first_share": len(fleet[0].sessions) / sessions}


async def ours(directory: Path, sessions: int) -> dict[str, float]:
    """Each session opened at our router, which is running; its turns go straight to the replica."""
    async with (
        engines() as fleet,
        AsyncRolloutClient(directory) as trainer,
        RouterLink("worker", run_dir=directory) as link,
    ):
        await link.locate()
        for one in fleet:
            await trainer.add_replica(one.url, capacity=LIVE)
        await trainer.submit([{"task_id": f"t{n}", "data": {"question": "?"}} for n in range(sessions)], group_size=1)
        worker = HandWorker(link, "bench-1-a")
        await worker.through("init")

        async def run(number: int) -> None:
            (lease,) = await worker.lease("run", free=1, wait_s=10.0)
            body = {"rollout_id": lease["rollout_id"], "attempt": lease["attempt"]}
            session = await link.call("POST", "/v1/sessions", body, answer=dict[str, Any])
            await conversation(str(number), session["replica_url"])
            await worker.commit(lease)

        return await through(run, fleet, sessions)


async def peer(program: str, sessions: int) -> dict[str, float]:
    """Every turn through the other router, which keeps a session where it began."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with engines() as fleet:
        urls = [one.url for one in fleet]
        command = [
            program, "--host", "127.0.0.1", "--port", str(port), "--policy", "sticky_least_loaded",
            "--prometheus-port", str(port + 1), "--worker-urls", *urls,
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                deadline = time.monotonic() + 60
                while not await _answers(f"http://127.0.0.1:{port}"):
                    if time.monotonic() > deadline or process.poll() is not None:
                        raise RuntimeError(f"{program} does not answer")
                return await through(lambda n: conversation(str(n), f"http://127.0.0.1:{port}"), fleet, sessions)
            finally:
                process.terminate()


async def _answers(url: str) -> bool:
    try:
        await conversation("first", url)
    except (OSError, RuntimeError, asyncio.IncompleteReadError):
        await asyncio.sleep(0.2)
        return False
    return True


def compared(sessions: int = SESSIONS) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Our figures, and those of each of `PEERS` that is installed."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "run"
        command = [sys.executable, "-P", "-m", "tests.support.ledger_crowd", "router", str(directory)]
        with subprocess.Popen(command) as router:
            try:
                poll(lambda: beacon.read(RunLayout(directory)), "the router publishes itself", 60, 0.05)
                mine = asyncio.run(ours(directory, sessions))
            finally:
                router.kill()
    others = {name: asyncio.run(peer(found, sessions)) for name in PEERS if (found := shutil.which(name))}
    return (
        {f"thrash_{key}": value for key, value in mine.items()},
        {name: {f"thrash_{key}": value for key, value in found.items()} for name, found in others.items()},
    )
