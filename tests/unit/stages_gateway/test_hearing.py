"""Engines' own streams: read in whatever parts they come, refused, broken off, and of engines that have none."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from stages.dialects import Piece
from stages.engine_client import EngineClient, EngineUnavailableError
from stages.trajectory import Sampling, VersionSpan

Answer = Callable[[str, dict[str, Any]], tuple[int, list[bytes] | bytes]]
"""From a path and a body to a status and a body: whole, or the parts of a stream."""


@contextlib.asynccontextmanager
async def engine(answer: Answer) -> AsyncIterator[str]:
    """An engine that answers as it is told, each part of a stream on its own; a part b"" loses the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                size = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("Content-Length:")), 0)
                body = json.loads(await reader.readexactly(size) or b"{}")
                path = head.split(" ")[1]
                if path == "/v1/models":
                    status, said = 200, json.dumps({"data": [{"id": "m", "max_model_len": 99}]}).encode()
                else:
                    status, said = answer(path, body)  # type: ignore[assignment]
                if isinstance(said, bytes):
                    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(said), said))
                    continue
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n")
                writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
                for part in said:
                    if not part:
                        writer.transport.abort()
                    writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                    await writer.drain()
                    await asyncio.sleep(0)
                writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def event(ids: list[int], finish: str | None = None, usage: Any = None) -> bytes:
    """One of vLLM's generate."""
    logprobs = {"content": [{"token_id": one, "logprob": -one / 8, "rank": 1} for one in ids]}
    spans = [{"version": "4", "start": 0, "end": 3}] if finish else None
    choice = {"index": 0, "finish_reason": finish, "token_ids": ids, "weight_versions": spans, "logprobs": logprobs}
    value = {"request_id": "r", "usage": usage, "choices": [] if usage else [choice]}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


USAGE = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
DONE = b"data: [DONE]\n\n"


async def heard(url: str) -> tuple[list[list[int]], Any]:
    """What comes while it is sampled, and what it comes to."""
    pieces: list[Piece] = []
    async with EngineClient() as client:
        whole = await client.generate(url, [1, 2], Sampling(), name="t", timeout_s=20, hear=pieces.append)
    return [piece.token_ids for piece in pieces], whole


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_a_stream_is_read_whatever_its_parts_are(size: int) -> None:
    said = event([5]) + event([6, 7], "stop") + event([], usage=USAGE) + DONE
    asked = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, list[bytes]]:
        asked.append((path, body["stream"], body["stream_options"]))
        return 200, [said[n : n + size] for n in range(0, len(said), size)]

    async with engine(answer) as url:
        pieces, whole = await heard(url)
    assert asked == [("/inference/v1/generate", True, {"include_usage": True})]
    assert pieces == [[5], [6, 7]] and whole.token_ids == [5, 6, 7] and whole.logprobs == [-0.625, -0.75, -0.875]
    assert (whole.finish_reason, whole.versions, whole.cached_tokens) == ("stop", [VersionSpan(4, 0, 3)], 8)


@pytest.mark.parametrize(
    ("parts", "kind", "says"),
    [
        ([event([5]), b'data: {"error": {"message": "the engine died"}}\n\n', DONE], "answer", "the engine died"),
        ([event([5]), DONE], "answer", "ended after 1 tokens without a finish reason"),
        ([event([5]), b""], "read", "closed the connection in the middle"),
        ([b'data: {"choices": [{"token_ids": [5]}]}\n\n'], "answer", "1 tokens but 0 log-probs"),
    ],
    ids=["error", "no-end", "lost", "no-logprobs"],
)
async def test_a_stream_that_breaks_says_how(parts: list[bytes], kind: str, says: str) -> None:
    async with engine(lambda path, _: (200, parts) if path.endswith("/generate") else (200, b"{}")) as url:
        with pytest.raises(EngineUnavailableError, match=says) as caught:
            await heard(url)
    assert caught.value.kind == kind


@pytest.mark.parametrize(("refuses", "says"), [(False, [True, True]), (True, [True, False, False])])
async def test_an_engine_that_does_not_stream_is_asked_for_whole_answers(refuses: bool, says: list[bool]) -> None:
    choice = {"token_ids": [5], "finish_reason": "stop", "logprobs": {"content": [{"logprob": -1.0}]}}
    asked: list[bool] = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        asked.append("stream" in body)
        if refuses and asked[-1]:
            return 400, b'{"error": {"message": "streaming is not built"}}'
        return 200, json.dumps({"choices": [choice]}).encode()

    async with engine(answer) as url, EngineClient() as client:
        for _ in range(2):
            pieces: list[Piece] = []
            got = await client.generate(url, [1], Sampling(), name="t", timeout_s=20, hear=pieces.append)
            assert got.token_ids == [5] and pieces == []
    assert asked == says


async def test_completions_stream_and_sglang_is_asked_for_all_at_once() -> None:
    def completions(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/v1/completions":
            return 404, b'{"detail": "Not Found"}'
        assert body["stream"] and body["return_token_ids"]
        choice = {"token_ids": [5], "finish_reason": "length", "logprobs": {"token_logprobs": [-1.0]}}
        events = [{"choices": [choice]}, {"choices": [], "usage": USAGE}]
        return 200, [b"data: " + json.dumps(one).encode() + b"\n\n" for one in events]

    async with engine(completions) as url:
        pieces, whole = await heard(url)
    assert pieces == [[5]] and (whole.finish_reason, whole.versions, whole.cached_tokens) == ("length", [], 8)

    def sglang(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        meta = {"output_token_logprobs": [[-1.0, 5, None]], "finish_reason": {"type": "stop"}}
        found = path == "/generate" and "stream" not in body
        return (200, json.dumps({"meta_info": meta}).encode()) if found else (404, b'{"detail": "Not Found"}')

    async with engine(sglang) as url:
        pieces, whole = await heard(url)
    assert pieces == [] and whole.token_ids == [5]
