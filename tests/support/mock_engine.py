"""A scripted engine behind the fleet's part of vLLM's wire format, on a raw asyncio protocol: it costs next to nothing.

`MockEngine` lives in a test's loop; `python -P -m tests.support.mock_engine PORT_FILE` is a process of its own.
Each answer is a bash call until a stream has had `calls` of them, then a final sentence.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, cast

import msgspec

from stages.chat import ChatTokenizer
from stages.web import run

POLICY = Path(__file__).parents[2] / "workflows/policies/tiny"
CONTEXT = 4096
REASONS = {200: "OK", 404: "Not Found", 500: "Internal Server Error", 503: "Service Unavailable"}


class _Body(msgspec.Struct):
    token_ids: list[int]
    model: str | None = None


class Script:
    """What a policy says in an arith rollout: `calls` shell calls, then an answer; ready as token ids."""

    def __init__(self, calls: int = 3) -> None:
        chat = ChatTokenizer.load(POLICY)
        call = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo $((12 + 30))"}}\n</tool_call>'
        (self._end,) = chat.encode("<|im_end|>")
        self._call, self._answer, self._calls = chat.encode(call), chat.encode("The answer is 42."), calls

    def reply(self, prompt: list[int]) -> list[int]:
        """System and user end two messages of a prompt; each turn ends two more."""
        turn = (prompt.count(self._end) - 2) // 2
        return [*(self._call if turn < self._calls else self._answer), self._end]


class MockEngine:
    """One replica. `latency_s` and `errors` (share of generations answered 500) are of generations alone.

    `down` closes every connection at once; `broken` names paths that answer 500, `hanging` those that
    never answer; `asked` counts paths; `models` are
    those that generations named. After `hold(n)` the n first generations are answered, the rest wait (`held` counts
    them) until `let_go`.
    """

    def __init__(self, script: Script | None = None, *, latency_s: float = 0.0, errors: float = 0.0) -> None:
        self._script, self.latency_s, self.errors = script, latency_s, errors
        self.down, self.paused, self.version, self.weights = False, False, "0", ""
        self.broken: set[str] = set()
        self.hanging: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.models: set[str | None] = set()
        self.held = 0
        self._answers: int | None = None
        self._let_go = asyncio.Event()
        self.gauges = {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0,
                       "num_preemptions_total": 0.0, "prefix_cache_queries_total": 0.0,
                       "prefix_cache_hits_total": 0.0}  # fmt: skip
        self.calls: list[str] = []
        self.connections: set[asyncio.Transport] = set()
        self._random = random.Random(1)
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._server: asyncio.Server | None = None
        self.url = ""

    async def __aenter__(self) -> MockEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()

    async def start(self, port: int = 0) -> None:
        """Listen; the same port again after `stop` is the same replica come back."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", port, backlog=4096)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """Die: the port and every connection close at once."""
        assert self._server is not None
        self._server.close()
        for transport in list(self.connections):
            transport.abort()

    def hold(self, answers: int = 0) -> None:
        """Answer so many generations from now on, and keep the others waiting."""
        self._answers = answers
        self._let_go.clear()

    def let_go(self) -> None:
        """Answer what was held, and whatever comes."""
        self._answers = None
        self._let_go.set()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def answer(self, method: str, target: str, body: bytes) -> tuple[int, Any]:
        """Status and body (bytes as they are, else JSON) of one request."""
        path, _, query = target.partition("?")
        self.asked[path] += 1
        if path in self.hanging:
            await asyncio.Event().wait()
        if path in self.broken:
            return 500, {"error": {"message": f"{path} is broken"}}
        match path:
            case "/inference/v1/generate":
                return await self._generate(body)
            case "/health":
                return 200, b""
            case "/metrics":
                lines = (f'vllm:{name}{{engine="0"}} {value}' for name, value in self.gauges.items())
                return 200, ("\n".join(lines) + "\n").encode()
            case "/v1/models":
                return 200, {"object": "list", "data": [{"id": "tiny", "max_model_len": CONTEXT}]}
            case "/is_paused":
                return 200, {"is_paused": self.paused}
            case "/weight_info":
                return 200, {"weight_version": self.version}
            case "/reset_prefix_cache":
                self.calls.append("reset")
                return 200, {"success": True}
        return self._steer(path, query, body)

    def _steer(self, path: str, query: str, body: bytes) -> tuple[int, Any]:
        match path:
            case "/pause":
                self.calls.append(query)
                self.paused = True
                self._resumed.clear()
                return 200, {"status": "paused"}
            case "/resume":
                self.calls.append("resume")
                self.paused = False
                self._resumed.set()
                return 200, {"status": "resumed"}
            case "/update_weight_version":
                self.version = json.loads(body)["new_version"]
                self.calls.append(f"stamp {self.version}")
                return 200, {"success": True, "new_version": self.version}
            case "/collective_rpc":
                self.weights = json.loads(body)["kwargs"]["weights_path"]
                self.calls.append("load")
                return 200, {"results": [None]}
            case "/v1/load_lora_adapter":
                self.weights = json.loads(body)["lora_path"]
                self.calls.append("adapter")
                return 200, b"Success"
        return 404, {"detail": "Not Found"}

    async def _generate(self, body: bytes) -> tuple[int, Any]:
        request = msgspec.json.decode(body, type=_Body)
        prompt = request.token_ids
        self.models.add(request.model)
        if self.errors and self._random.random() < self.errors:
            return 500, {"error": {"message": "injected"}}
        await self._resumed.wait()
        await self._may_answer()
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        ids = self._script.reply(prompt) if self._script else [5, 6, 7]
        logprobs = [{"token_id": one, "logprob": -0.5} for one in ids]
        span = {"version": self.version, "start": 0, "end": len(ids)}
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": logprobs},
                  "weight_versions": [span]}  # fmt: skip
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        return 200, {"request_id": "generate-tokens-mock", "choices": [choice], "usage": usage}

    async def _may_answer(self) -> None:
        if self._answers is None:
            return
        if self._answers > 0:
            self._answers -= 1
            return
        self.held += 1
        try:
            await self._let_go.wait()
        finally:
            self.held -= 1


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, no chunks, no pipelining."""

    def __init__(self, engine: MockEngine) -> None:
        self._engine, self._buffer = engine, bytearray()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._engine.connections.add(self._transport)
        if self._engine.down:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        assert self._transport is not None
        self._engine.connections.discard(self._transport)
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end])
        lines = head.split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line[:15].lower() == b"content-length:"), 0)
        if len(self._buffer) < end + 4 + length:
            return
        body = bytes(self._buffer[end + 4 : end + 4 + length])
        del self._buffer[: end + 4 + length]
        method, target, _ = lines[0].decode().split(" ")
        self._task = asyncio.get_running_loop().create_task(self._respond(method, target, body))

    async def _respond(self, method: str, target: str, body: bytes) -> None:
        status, answer = await self._engine.answer(method, target, body)
        content = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
        assert self._transport is not None
        if not self._transport.is_closing():
            head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\n"
            self._transport.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)


async def _serve(port_file: Path, latency_s: float, errors: float) -> None:
    async with MockEngine(Script(), latency_s=latency_s, errors=errors) as engine:
        temporary = port_file.with_suffix(".new")
        temporary.write_text(engine.url)
        temporary.rename(port_file)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port_file", type=Path)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--errors", type=float, default=0.0)
    given = parser.parse_args()
    run(_serve(given.port_file, given.latency_ms / 1000, given.errors))


if __name__ == "__main__":
    main()
