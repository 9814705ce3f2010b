"""B16 and B29: engines that never answer well cost bounded tries and time; the trainer gets what was sampled."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stages.chat import ChatTokenizer
from stages.engine_client import EngineClient, EngineUnavailableError
from stages.errors import LLMError
from stages.model import StreamModel
from stages.trajectory import Message, Sampling
from stages.wire import SessionOut

POLICY = Path(__file__).parents[3] / "workflows" / "policies" / "tiny"
CHAT = ChatTokenizer.load(POLICY)
PATIENCE_S = 0.5
DEADLINE_S = 60.0
"""By which each of these ends on a machine of any load: what bounds it in truth is the patience."""
MODELS = {"object": "list", "data": [{"id": "tiny", "max_model_len": 2048}]}

Handler = Callable[[str, bytes, asyncio.StreamWriter], Awaitable[None]]


def answer(writer: asyncio.StreamWriter, status: int, body: object, *headers: str) -> None:
    content = json.dumps(body).encode()
    head = [f"HTTP/1.1 {status} x", f"Content-Length: {len(content)}", "Content-Type: application/json", *headers]
    writer.write("\r\n".join([*head, "", ""]).encode() + content)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[str, list[tuple[str, bytes]]]]:
    """A server that tells its models and leaves the rest to the handler; gives its URL and the other requests."""
    asked: list[tuple[str, bytes]] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ", 2)[1].decode()
                lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
                body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
                if path == "/v1/models":
                    answer(writer, 200, MODELS)
                else:
                    asked.append((path, body))
                    await handler(path, body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()


def model_on(url: str, client: EngineClient) -> StreamModel:
    async def open_session(failed: str | None) -> SessionOut:
        return SessionOut("1", "r", url, 0)

    return StreamModel(client, open_session, CHAT, Sampling(max_tokens=8), name="t", patience_s=PATIENCE_S)


async def given_up(url: str) -> None:
    """A turn on this engine ends; the slot is free then. A try that never ended would hang here."""
    async with EngineClient() as client:
        with pytest.raises(LLMError, match=r"no replica answered for 0\.5 s"):
            await asyncio.wait_for(model_on(url, client).generate(messages=[Message("user", "12 + 7 = ?")]), DEADLINE_S)


async def test_b16_an_endpoint_that_answers_429_for_ever_is_given_up_in_bounded_tries() -> None:
    async def busy(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        answer(writer, 429, {"error": {"code": "busy", "message": "later"}}, "Retry-After: 0")

    async with serving(busy) as (url, asked):
        await given_up(url)
        assert 1 <= len(asked) <= 6


async def test_b16_who_asks_to_stay_away_longer_than_the_patience_is_not_asked_again() -> None:
    async def busy(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        answer(writer, 429, {"error": {"code": "busy", "message": "later"}}, "Retry-After: 20")

    async with serving(busy) as (url, asked):
        await given_up(url)
        assert len(asked) == 1


async def test_b16_a_dead_port_is_given_up_by_the_deadline() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        await given_up(f"http://127.0.0.1:{closed.getsockname()[1]}")


async def test_b16_a_slow_drip_ends_at_the_whole_answers_deadline_and_its_request_is_aborted() -> None:
    async def drip(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path != "/inference/v1/generate":
            answer(writer, 200, {})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        for _ in range(120):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.05)
        writer.close()

    async with serving(drip) as (url, asked), EngineClient() as client:
        with pytest.raises(EngineUnavailableError, match=r"no whole answer within 2 s") as caught:
            await client.generate(url, [1, 2], Sampling(max_tokens=8), name="t", timeout_s=2.0)
        assert caught.value.kind == "timeout"
        (_, sent), (path, abort) = asked
        assert path == "/inference/v1/abort_requests"
        assert json.loads(abort) == {"request_ids": ["generate-tokens-" + json.loads(sent)["request_id"]]}


async def test_b16_a_broken_connection_is_tried_again_under_a_new_request_id() -> None:
    async def broken(path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/inference/v1/generate":
            writer.transport.abort()
        else:
            answer(writer, 200, {})

    async with serving(broken) as (url, asked):
        await given_up(url)
        names = [json.loads(body)["request_id"] for path, body in asked if path == "/inference/v1/generate"]
        assert len(names) > 1 and len(set(names)) == len(names)


EOS = sorted(CHAT.eos_ids)[-1]
ODD = [CHAT.encode(letter)[0] for letter in "answer"] + [EOS]
"""Ids that encoding their own text would not give."""
LOGPROBS = [-0.25 * n for n in range(len(ODD))]


def generated() -> dict[str, object]:
    content = [{"token_id": one, "logprob": p, "rank": 1} for one, p in zip(ODD, LOGPROBS, strict=True)]
    choice = {"index": 0, "finish_reason": "stop", "token_ids": ODD, "logprobs": {"content": content}}
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": len(ODD)}]
    return {"choices": [{**choice, "weight_versions": spans}]}


def completed() -> dict[str, object]:
    logprobs = {"token_logprobs": LOGPROBS, "tokens": ["x"] * len(ODD)}
    return {"choices": [{"text": "answer", "finish_reason": "stop", "token_ids": ODD, "logprobs": logprobs}]}


def sglang() -> dict[str, object]:
    told = [[p, one, None] for one, p in zip(ODD, LOGPROBS, strict=True)]
    finish = {"type": "stop", "matched": EOS}
    meta = {"output_token_logprobs": told, "finish_reason": finish, "cached_tokens": 4, "weight_version": "5"}
    return {"text": "answer", "output_ids": ODD, "meta_info": meta}


@pytest.mark.parametrize(
    ("path", "body", "versions"),
    [
        ("/inference/v1/generate", generated(), [(3, 0, 2), (4, 2, len(ODD))]),
        ("/v1/completions", completed(), []),
        ("/generate", sglang(), [(5, 0, len(ODD))]),
    ],
)
async def test_b29_the_trainer_gets_the_sampled_ids_whatever_dialect_they_came_in(
    path: str, body: object, versions: list[tuple[int, int, int]]
) -> None:
    assert CHAT.encode(CHAT.decode(ODD)) != ODD

    async def one_dialect(asked: str, _: bytes, writer: asyncio.StreamWriter) -> None:
        answer(writer, 200, body) if asked == path else answer(writer, 404, {"detail": "Not Found"})

    async with serving(one_dialect) as (url, asked), EngineClient() as client:
        model = model_on(url, client)
        reply = await model.generate(messages=[Message("user", "hello")])
        await model.generate(messages=[Message("user", "hello"), reply, Message("user", "go on")])
        (chain,) = model.trajectory().chains
    turn = chain.turns[0]
    assert list(chain.token_ids[turn.start : turn.end]) == ODD
    assert list(chain.logprobs[turn.start : turn.end]) == LOGPROBS
    assert len(chain.token_ids) == len(chain.loss_mask) == len(chain.logprobs)
    assert sum(chain.loss_mask) == 2 * len(ODD)
    spans = [(span.version, span.start - turn.start, span.end - turn.start) for span in chain.policy_versions]
    assert spans[: len(versions)] == versions
    prompts = [json.loads(sent) for at, sent in asked if at == path]
    ids = prompts[1].get("token_ids") or prompts[1].get("prompt") or prompts[1].get("input_ids")
    assert ids[: turn.end] == list(chain.token_ids[: turn.end])
    # Once an engine's dialect is known, the others are not tried again.
    assert [at for at, _ in asked].count(path) == 2 and asked[-1][0] == path
