"""The capture gateway: requests a second, CPU a request and added latency, with histories of 64 KB that grow by turns.

`python -m tests.bench.gateway [--json] [--quick]`. One process is the gateway, on one core; a mock engine that answers
at once is another, the clients a third. Every request carries a whole history; the first one of each is not counted.
`gateway_*`: the history is matched to its chain and sampled from through a worker's own engine client, with nothing
rendered or encoded here. `rendered_*`: with both, as in a run: the chat template is rendered over the whole history.
`bare_*`: requests read and answered from nothing, without chain and engine. `relay_*`: bodies that go to the engine as
they came; the product has no such path, it is its server and its client alone, and nginx does the same beside it where
it is installed. `megabyte_*`: bodies of 1 MB. `streams_*`: 256 streams at once, of whole answers. `live_*`: streams of
an engine that streams, LIVE_TOKENS tokens one by one. `*_per_cpu_s` is what a whole core would do: other load on the
machine takes of the other figures alone.

Latencies: `*_p50_ms` of one client, which waits for nobody else; `*_16_p50_ms` of 16 that each ask again at once, so
that they wait for each other; `*_open_p50_ms` of OPEN_PER_S requests a second, counted from when each was due.
`gateway_added_p50_ms` is the first without what the engine itself takes, asked by the same client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from sandbox.directory import loopback
from stages.chat import ChatTokenizer
from stages.engine_client import EngineClient
from stages.gateway.asks import Answer, Ask
from stages.gateway.histories import Heard
from stages.gateway.live import Live
from stages.gateway.server import GatewayServer
from stages.gateway.session import CaptureSession, Exchange
from stages.http import Client as HttpClient
from stages.model import StreamModel
from stages.trajectory import Message, Sampling
from stages.web import run
from stages.wire import SessionOut
from tests.bench.report import emit
from tests.support.gateways import POLICY
from tests.support.mock_engine import MockEngine
from tests.support.waiting import poll

CLIENTS: Final = 16
TURNS: Final = 64
BODY_BYTES: Final = 64 * 1024
MESSAGES: Final = 20
STREAMS: Final = 256
LIVE_TOKENS: Final = 64
OPEN_PER_S: Final = 400
IDS: Final = [1000 + number * 7919 % 150_000 for number in range(BODY_BYTES)]
"""As long as those of real vocabularies."""


class LongEngine(MockEngine):
    """A mock engine whose context takes such histories, and whose answers cost it nothing."""

    async def answer(self, method: str, target: str, body: bytes) -> tuple[int, Any]:
        if target == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "tiny", "max_model_len": 10_000_000}]}
        return 200, ANSWER


class StreamingEngine(asyncio.Protocol):
    """Answers every request with the same stream, an event a token, each on its own."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, _ = bytes(self._buffer[:2048]).partition(b"\r\n\r\n")
        _, named, length = head.lower().partition(b"content-length: ")
        if not found or len(self._buffer) < len(head) + 4 + int(length.split(b"\r\n")[0] if named else 0):
            return
        self._buffer.clear()
        assert self._transport is not None
        if head.startswith(b"GET"):
            models = json.dumps({"data": [{"id": "tiny", "max_model_len": 10_000_000}]}).encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(models), models))
        else:
            self._transport.write(STREAM_HEAD)
            self._say(0)

    def _say(self, number: int) -> None:
        assert self._transport is not None
        self._transport.write(STREAM[number])
        if number + 1 < len(STREAM):
            asyncio.get_running_loop().call_soon(self._say, number + 1)


def stream_events() -> list[bytes]:
    """What StreamingEngine says, as chunks."""
    said = []
    for number in range(LIVE_TOKENS):
        last = number == LIVE_TOKENS - 1
        entry = {"token_id": 5, "logprob": -0.5, "rank": 1, "top_logprobs": []}
        choice = {"index": 0, "finish_reason": "length" if last else None, "stop_reason": None,
                  "token_ids": [300 + number], "routed_experts": None, "sampling_mask": None,
                  "logprobs": {"content": [entry]},
                  "weight_versions": [{"version": "0", "start": 0, "end": LIVE_TOKENS}] if last else None}  # fmt: skip
        said.append({"request_id": "r", "usage": None, "output_mode": "tokens", "choices": [choice]})
    texts = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in said] + [b"data: [DONE]\n\n"]
    return [b"%x\r\n%s\r\n" % (len(text), text) for text in texts] + [b"0\r\n\r\n"]


STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM: Final = stream_events()


ANSWER: Final = json.dumps(
    {"choices": [{"index": 0, "token_ids": [5, 6, 7], "finish_reason": "stop",
                  "logprobs": {"content": [{"token_id": one, "logprob": -0.5} for one in (5, 6, 7)]},
                  "weight_versions": [{"version": "0", "start": 0, "end": 3}]}],
     "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}}
).encode()  # fmt: skip


class Ready(ChatTokenizer):
    """Knows what texts come to without rendering or encoding them: an id for four of their bytes."""

    def render(self, messages: Any, tools: Any = None, add_generation_prompt: bool = True) -> str:
        return "".join(str(message.content) for message in messages)

    def bridge(self, previous: Any, new: Any, tools: Any, ended: bool) -> str | None:
        return "between the turns"

    def encode(self, text: str) -> list[int]:
        return IDS[: len(text) // 4]


class Echoing(CaptureSession):
    """A session without capture: each request is read and answered from nothing."""

    async def _answer(self, ask: Ask, live: Live | None = None) -> Answer:
        return said(ask.model, "ok")


class Relaying(CaptureSession):
    """A session that gives bodies to the engine as they are, unread."""

    def __init__(self, model: StreamModel, *, max_turns: int, post: Callable[[bytes], Any]) -> None:
        super().__init__(model, max_turns=max_turns)
        self._post = post

    def ask(self, path: str, body: bytes, *, again: bool = False) -> Exchange:
        return Exchange(path, Heard(body, Ask()), asyncio.get_running_loop().create_task(self._relayed(body)))

    async def _relayed(self, body: bytes) -> Answer:
        return said("m", str(len(await self._post(body))))


def said(model: str, text: str) -> Answer:
    """An answer to nothing."""
    return Answer(number="1", created=1, model=model, reply=Message("assistant", text), finish="stop",
                  prompt_tokens=1, completion_tokens=1)  # fmt: skip


def engine_process(told: Connection) -> None:
    """Body of the mock engine's process."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        streaming = await loop.create_server(StreamingEngine, "127.0.0.1", 0)
        async with LongEngine() as engine:
            told.send((engine.url, f"http://127.0.0.1:{streaming.sockets[0].getsockname()[1]}"))
            await asyncio.Event().wait()

    others(os.sched_getaffinity(0))
    asyncio.run(serve())


def others(cores: set[int]) -> None:
    """Leave the gateway its core, where there are several."""
    os.sched_setaffinity(0, cores - {min(cores)} or cores)


def gateway_process(told: Connection, engine_url: str, live_url: str, sessions: int) -> None:
    """Body of the gateway's process; tells its port and tokens, then its CPU seconds whenever it is asked."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    async def serve() -> None:
        async def session(failed: str | None) -> SessionOut:
            return SessionOut("1", "replica-1", engine_url, 0)

        async def live_session(failed: str | None) -> SessionOut:
            return SessionOut("2", "replica-2", live_url, 0)

        async with EngineClient() as client, HttpClient(connections=1024) as plain, GatewayServer() as server:

            async def post(body: bytes) -> bytes:
                return (await plain.post(f"{engine_url}/relay", content=body)).content

            port = await server.listen(loopback())
            ready, real = Ready.load(POLICY), ChatTokenizer.load(POLICY)
            tokens: dict[str, list[str]] = {}
            for name, chat, count in (
                ("relay", ready, CLIENTS), ("bare", ready, CLIENTS), ("gateway", ready, sessions),
                ("rendered", real, CLIENTS), ("megabyte", ready, 4), ("streams", ready, STREAMS),
                ("live", ready, CLIENTS), ("gateway alone", ready, 2), ("rendered alone", real, 2),
                ("gateway open", ready, CLIENTS), ("rendered open", real, CLIENTS),
            ):  # fmt: skip
                tokens[name] = []
                for _ in range(count):
                    opened = live_session if name == "live" else session
                    model = StreamModel(client, opened, chat, Sampling(max_tokens=LIVE_TOKENS), name="b")
                    if name == "relay":
                        made: CaptureSession = Relaying(model, max_turns=10**9, post=post)
                    else:
                        made = (Echoing if name == "bare" else CaptureSession)(model, max_turns=10**9)
                    server.add(made)
                    tokens[name].append(made.token)
            told.send((port, tokens))
            asyncio.get_running_loop().add_reader(told.fileno(), lambda: told.send(cpu_s()) if told.recv() else None)
            await asyncio.Event().wait()

    run(serve())


def cpu_s() -> float:
    """CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Client(asyncio.Protocol):
    """One keep-alive connection: a request out, its answer back."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._answered: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(RuntimeError(f"the connection was lost: {error}"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or self._answered is None:
            return
        _, found, length = bytes(self._buffer[:end]).lower().partition(b"content-length: ")
        if found:
            whole = len(self._buffer) >= end + 4 + int(length.split(b"\r\n")[0])
        else:
            whole = self._buffer.endswith(b"\r\n0\r\n\r\n")
        if whole:
            answer = bytes(self._buffer)
            self._buffer.clear()
            if answer.startswith(b"HTTP/1.1 200"):
                self._answered.set_result(answer[end + 4 :])
            else:
                self._answered.set_exception(RuntimeError(answer.decode()[:200]))

    async def ask(self, token: str, body: bytes) -> bytes:
        """The answer's body."""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {token}\r\n"
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return await self._answered


class History:
    """A conversation as a client sends it: whole, each time with two messages more."""

    def __init__(self, number: int, size: int = BODY_BYTES, *, stream: bool = False) -> None:
        text = "The function reads its file line by line and counts the words. " * (1 + size // MESSAGES // 60)
        roles, each = ("user", "assistant"), size // MESSAGES - 64
        messages = [{"role": roles[n % 2], "content": f"{number}.{n} {text[:each]}"} for n in range(MESSAGES - 1)]
        self._text = json.dumps({"model": "m", "stream": stream, "messages": messages})[:-2].encode()

    @property
    def body(self) -> bytes:
        return self._text + b"]}"

    def go_on(self, reply: str) -> None:
        more = [{"role": "assistant", "content": reply}, {"role": "user", "content": "And the next file?"}]
        self._text += b", " + json.dumps(more)[1:-1].encode()


class Driven(NamedTuple):
    """What a drive came to: requests, seconds, CPU seconds of who answered, latencies, what went wrong."""

    requests: int
    wall_s: float
    spent_s: float
    latencies: list[float]
    errors: list[str]

    def figures(self, name: str) -> dict[str, float]:
        """As the benchmark prints them."""
        return {
            f"{name}_requests_per_s": self.requests / self.wall_s,
            f"{name}_cpu_ms_per_request": self.spent_s * 1000 / max(1, self.requests),
            f"{name}_requests_per_cpu_s": self.requests / max(1e-9, self.spent_s),
        }


async def drive(
    port: int, tokens: Sequence[str], turns: int, spent: Callable[[], float], *, clients: int = CLIENTS,
    size: int = BODY_BYTES, stream: bool = False, every_s: float = 0.0,
) -> Driven:  # fmt: skip
    """So many clients at once, each with its part of the sessions one after the other, so many turns in each.

    With `every_s` one of them asks as often, whatever became of the others' requests.
    """
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    errors: list[str] = []

    async def turn(client: Client, token: str, history: History) -> None:
        started = time.perf_counter()
        answer = await client.ask(token, history.body)
        latencies.append(time.perf_counter() - started)
        history.go_on(reply(answer))

    async def one(client: Client, mine: list[tuple[str, History]], turns: int, first_at: float = 0.0) -> None:
        for token, history in mine:
            try:
                for number in range(turns):
                    due = first_at + number * every_s * len(made)
                    if first_at:
                        await asyncio.sleep(due - loop.time())
                    await turn(client, token, history)
                    if first_at:
                        latencies[-1] = loop.time() - due
            except RuntimeError as error:
                errors.append(str(error))

    every = [(token, History(number, size, stream=stream)) for number, token in enumerate(tokens)]
    made = [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(min(clients, len(tokens)))]
    parts = [every[number :: len(made)] for number in range(len(made))]
    await asyncio.gather(*(one(client, mine, 1) for client, mine in zip(made, parts, strict=True)))
    latencies.clear()
    before, started = spent(), time.perf_counter()
    at = [loop.time() + 0.01 + number * every_s if every_s else 0.0 for number in range(len(made))]
    await asyncio.gather(*(one(client, mine, turns, t) for client, mine, t in zip(made, parts, at, strict=True)))
    return Driven(len(latencies), time.perf_counter() - started, spent() - before, latencies, errors)


def reply(answer: bytes) -> str:
    """What an answer says, whole or streamed; nothing where it is the engine's own."""
    if answer.startswith(b"{"):
        return str(json.loads(answer)["choices"][0].get("message", {}).get("content", ""))
    events = [line.removeprefix(b"data: ") for line in answer.split(b"\r\n") if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)


NGINX: Final = """daemon off; worker_processes 1; pid {place}/pid; error_log {place}/error.log;
events {{ worker_connections 1024; }}
http {{ access_log off; client_max_body_size 8m; client_body_buffer_size 2m;
  client_body_temp_path {place}/body; proxy_temp_path {place}/proxy; fastcgi_temp_path {place}/fastcgi;
  uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi; keepalive_requests 1000000;
  upstream engine {{ server {engine}; keepalive 64; keepalive_requests 1000000; }}
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://engine; proxy_http_version 1.1;
    proxy_set_header Connection ""; proxy_request_buffering on; }} }} }}
"""


def nginx(engine_url: str, turns: int) -> dict[str, float]:
    """The same bodies through nginx, one worker on one core; nothing where it is not installed."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        return {}
    with loopback() as sock, tempfile.TemporaryDirectory() as place:
        port = int(sock.getsockname()[1])
        sock.close()
        engine = engine_url.removeprefix("http://")
        Path(place, "conf").write_text(NGINX.format(place=place, engine=engine, port=port), encoding="utf-8")
        os.chmod(place, 0o755)
        core = str(min(os.sched_getaffinity(0)))
        with subprocess.Popen(["taskset", "-c", core, program, "-c", f"{place}/conf"]) as process:
            try:
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
                poll(lambda: bool(children.read_text()), "nginx has its worker", 20, 0.02)
                worker = Path(f"/proc/{children.read_text().split()[0]}/stat")

                def spent() -> float:
                    fields = worker.read_text().rpartition(")")[2].split()
                    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

                driven = asyncio.run(drive(port, ["-"] * CLIENTS, turns, spent))
            finally:
                process.terminate()
    return driven.figures("relay")


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    results, errors, peers = measure(quick=given.quick)
    return emit("gateway", results, peers=peers, errors=errors, as_json=given.json)


def measure(
    *, quick: bool, names: Sequence[str] = ("relay", "bare", "gateway", "rendered", "megabyte", "streams", "live")
) -> tuple[dict[str, float], list[str], dict[str, dict[str, float]]]:
    """Figures, what went wrong, and nginx's figures where it was asked too."""
    results: dict[str, float] = {}
    errors: list[str] = []
    peers: dict[str, dict[str, float]] = {}
    sessions, turns = (CLIENTS, TURNS // 2) if quick else (CLIENTS * 8, TURNS)
    here, there = multiprocessing.Pipe()
    engine = multiprocessing.Process(target=engine_process, args=(there,), daemon=True)
    engine.start()
    url, live_url = here.recv()
    mine, its = multiprocessing.Pipe()
    gateway = multiprocessing.Process(target=gateway_process, args=(its, url, live_url, sessions), daemon=True)
    gateway.start()
    cores = os.sched_getaffinity(0)
    others(cores)

    def spent() -> float:
        mine.send(True)
        return float(mine.recv())

    try:
        port, tokens = mine.recv()
        for name in names:
            many = {"megabyte": 8, "streams": 4, "rendered": turns // 2, "live": turns // 2}.get(
                name, turns * (1 if quick else 4)
            )
            driven = asyncio.run(
                drive(port, tokens[name], turns if name == "gateway" else many, spent,
                      clients=STREAMS if name == "streams" else CLIENTS,
                      size=1 << 20 if name == "megabyte" else BODY_BYTES, stream=name in ("streams", "live"))
            )  # fmt: skip
            results |= driven.figures(name)
            results[f"{name}_errors"] = len(driven.errors)
            errors += [f"{name}: {error}" for error in driven.errors[:3]]
            if name == "live":
                results["live_cpu_ms_per_token"] = results["live_cpu_ms_per_request"] / LIVE_TOKENS
            if name in ("gateway", "rendered"):
                results[f"{name}_16_p50_ms"] = statistics.median(driven.latencies) * 1000
                alone = asyncio.run(drive(port, tokens[f"{name} alone"], turns, spent, clients=1))
                results[f"{name}_p50_ms"] = statistics.median(alone.latencies) * 1000
                free = asyncio.run(drive(port, tokens[f"{name} open"], turns, spent, every_s=1 / OPEN_PER_S))
                results[f"{name}_open_p50_ms"] = statistics.median(free.latencies) * 1000
                errors += [f"{name}: {error}" for error in [*alone.errors, *free.errors][:3]]
        if "gateway" in names:
            results["gateway_added_p50_ms"] = results["gateway_p50_ms"] - engine_p50_ms(url)
        if "relay" in names and (figures := nginx(url, turns)):
            peers["nginx"] = figures
    finally:
        os.sched_setaffinity(0, cores)
        gateway.kill()
        engine.kill()
    return results, errors, peers


def engine_p50_ms(url: str) -> float:
    """The engine's own answer to as many ids, by the same client: what there is without a gateway."""

    async def ask() -> float:
        ids, spent = IDS[: BODY_BYTES // 4], []
        async with EngineClient() as client:
            for _ in range(200):
                started = time.perf_counter()
                await client.generate(url, ids, Sampling(), name="b", timeout_s=30)
                spent.append(time.perf_counter() - started)
        return statistics.median(spent) * 1000

    return asyncio.run(ask())


if __name__ == "__main__":
    sys.exit(main())
