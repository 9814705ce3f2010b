"""The capture gateway: requests a second, CPU a request and added latency, with histories of 64 KB that grow by turns.

`python -m tests.bench.gateway [--json] [--quick]`. One process is the gateway, on one core; a mock engine that answers
at once is another, the clients a third. Every request carries a whole history, which grows; the first request of each,
which encodes all of it, is not counted. `gateway_*`: the history is matched to its chain and sampled from through a
worker's own engine client, with what is new neither rendered nor encoded. `rendered_*`: with both, as in a run; the
chat template is rendered twice over the whole history, which is most of it. `bare_*`: requests read and answered from
nothing, without chain and engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, Final, cast

import msgspec

from sandbox.directory import loopback
from stages.chat import ChatTokenizer
from stages.engine_client import EngineClient
from stages.gateway.asks import Answer, Ask
from stages.gateway.server import GatewayServer
from stages.gateway.session import CaptureSession
from stages.model import StreamModel
from stages.trajectory import Message, Sampling
from stages.wire import SessionOut
from tests.bench.report import emit
from tests.support.gateways import POLICY
from tests.support.mock_engine import MockEngine

SESSIONS: Final = 16
BODY_BYTES: Final = 64 * 1024
MESSAGES: Final = 20


class LongEngine(MockEngine):
    """A mock engine whose context takes such histories."""

    async def answer(self, method: str, target: str, body: bytes) -> tuple[int, Any]:
        if target == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "tiny", "max_model_len": 10_000_000}]}
        return await super().answer(method, target, body)


class Ready(ChatTokenizer):
    """Knows what comes between two turns without rendering or encoding it."""

    def bridge(self, previous: Any, new: Any, tools: Any, ended: bool) -> str | None:
        return "between"

    def encode(self, text: str) -> list[int]:
        return [1, 2, 3, 4] if text == "between" else super().encode(text)


class Echoing(CaptureSession):
    """A session without capture: each request is read and answered from nothing."""

    async def _answer(self, ask: Ask) -> Answer:
        return Answer(number="1", created=1, model=ask.model, reply=Message("assistant", "ok"), finish="stop",
                      prompt_tokens=1, completion_tokens=1)  # fmt: skip


def engine_process(told: Connection) -> None:
    """Body of the mock engine's process."""

    async def serve() -> None:
        async with LongEngine() as engine:
            told.send(engine.url)
            await asyncio.Event().wait()

    asyncio.run(serve())


def gateway_process(told: Connection, engine_url: str) -> None:
    """Body of the gateway's process; tells its port and tokens, then its CPU seconds whenever it is asked."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    async def serve() -> None:
        async def session(failed: str | None) -> SessionOut:
            return SessionOut("1", "replica-1", engine_url, 0)

        async with EngineClient() as client, GatewayServer() as server:
            port = await server.listen(loopback())
            tokens = []
            ready, real = Ready.load(POLICY), ChatTokenizer.load(POLICY)
            for kind, chat in ((Echoing, real), (CaptureSession, ready), (CaptureSession, real)):
                for _ in range(SESSIONS):
                    model = StreamModel(client, session, chat, Sampling(max_tokens=64), name="b")
                    made = kind(model, max_turns=10**9)
                    server.add(made)
                    tokens.append(made.token)
            told.send((port, tokens))
            asyncio.get_running_loop().add_reader(told.fileno(), lambda: told.send(cpu_s()) if told.recv() else None)
            await asyncio.Event().wait()

    asyncio.run(serve())


def cpu_s() -> float:
    """CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Client(asyncio.Protocol):
    """One keep-alive connection: a request out, its answer's body back."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._answered: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or self._answered is None:
            return
        length = int(bytes(self._buffer[:end]).lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        if len(self._buffer) >= end + 4 + length:
            body = bytes(self._buffer[end + 4 :])
            ok = self._buffer.startswith(b"HTTP/1.1 200")
            self._buffer.clear()
            if ok:
                self._answered.set_result(body)
            else:
                self._answered.set_exception(RuntimeError(body.decode()[:200]))

    async def ask(self, token: str, body: bytes) -> bytes:
        """The answer's body."""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {token}\r\n"
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return await self._answered


def history(number: int) -> list[dict[str, Any]]:
    """Messages of BODY_BYTES together."""
    text = ("The function reads its file line by line and counts the words. " * BODY_BYTES)[: BODY_BYTES // MESSAGES]
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": f"{number}.{n} {text}"} for n in range(MESSAGES - 1)]


async def drive(port: int, tokens: list[str], seconds: float, told: Connection) -> tuple[float, list[float]]:
    """Every token a client; CPU seconds of the gateway and latencies, the first request of each left out of both."""
    loop = asyncio.get_running_loop()
    counted: list[float] = []
    began = asyncio.Event()
    ready, spent = 0, [0.0]

    async def one(number: int, token: str) -> None:
        nonlocal ready
        _, client = await loop.create_connection(Client, "127.0.0.1", port)
        messages, body = history(number), b""
        until = float("inf")
        while time.perf_counter() < until:
            body = msgspec.json.encode({"model": "m", "messages": messages})
            started = time.perf_counter()
            answer = await client.ask(token, body)
            if until < float("inf"):
                counted.append(time.perf_counter() - started)
            reply = json.loads(answer)["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And the next file?"}]
            if until == float("inf"):
                ready += 1
                if ready == len(tokens):
                    spent[0] = gateway_cpu_s(told)
                    began.set()
                await began.wait()
                until = time.perf_counter() + seconds

    await asyncio.gather(*(one(number, token) for number, token in enumerate(tokens)))
    return gateway_cpu_s(told) - spent[0], counted


def gateway_cpu_s(told: Connection) -> float:
    """CPU seconds of the gateway's process so far."""
    told.send(True)
    return float(told.recv())


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    seconds = 1.0 if given.quick else 5.0
    results: dict[str, float] = {}
    here, there = multiprocessing.Pipe()
    engine = multiprocessing.Process(target=engine_process, args=(there,), daemon=True)
    engine.start()
    url = here.recv()
    mine, its = multiprocessing.Pipe()
    gateway = multiprocessing.Process(target=gateway_process, args=(its, url), daemon=True)
    gateway.start()
    try:
        port, made = mine.recv()
        for number, name in enumerate(("bare", "gateway", "rendered")):
            tokens = made[number * SESSIONS : (number + 1) * SESSIONS]
            spent_s, counted = asyncio.run(drive(port, tokens, seconds, mine))
            results[f"{name}_requests_per_s"] = len(counted) / seconds
            results[f"{name}_cpu_ms_per_request"] = spent_s * 1000 / max(1, len(counted))
            _, alone = asyncio.run(drive(port, tokens[:1], seconds / 2, mine))
            results[f"{name}_p50_ms"] = statistics.median(alone) * 1000
        results["gateway_added_p50_ms"] = results["gateway_p50_ms"] - engine_p50_ms(url)
    finally:
        gateway.kill()
        engine.kill()
    return emit("gateway", results, as_json=given.json)


def engine_p50_ms(url: str) -> float:
    """The engine's own answer to the same stream's ids, by the same client: what there is without a gateway."""

    async def ask() -> float:
        chat = ChatTokenizer.load(POLICY)
        ids = chat.encode("".join(str(message["content"]) for message in history(0)))
        spent = []
        async with EngineClient() as client:
            for _ in range(200):
                started = time.perf_counter()
                await client.generate(url, ids, Sampling(), name="b", timeout_s=30)
                spent.append(time.perf_counter() - started)
        return statistics.median(spent) * 1000

    return asyncio.run(ask())


if __name__ == "__main__":
    sys.exit(main())
