"""What requests' bodies may hold: a session's own many are refused, and a full process reads one at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from stages.gateway import server as wire
from stages.gateway.bodies import Hold, Pool, Share
from tests.support.client_suite import anthropic_client, openai_client
from tests.support.gateways import Gateway, gateway
from tests.support.waiting import eventually

LONG = json.dumps({"messages": [{"role": "user", "content": "hello " * 200}]}).encode()


class Reading:
    """A reader that only says whether it reads."""

    reads = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


def test_of_those_that_wait_for_room_the_first_reads_on() -> None:
    pool = Pool(most=10)
    one, two, three = (Hold(Share(100, pool)) for _ in range(3))
    readers = [Reading() for _ in range(3)]

    def reading() -> list[bool]:
        return [reader.reads for reader in readers]

    assert one.grow(8)
    pool.wait(readers[0])
    assert two.grow(8) and three.grow(8)
    for reader in readers * 2:
        pool.wait(reader)
    assert reading() == [True, False, False]
    pool.leave(readers[1])
    assert reading() == [True, True, False]
    pool.leave(readers[0])
    assert reading() == [True, True, True]
    pool.wait(readers[0])
    assert reading() == [False, True, True]
    two.free()
    assert reading() == [False, True, True] and pool.held == 16
    three.free()
    three.free()
    assert reading() == [True, True, True] and pool.held == 8


class Noting(Share):
    """Knows the most that it held."""

    peak = 0

    def take(self, size: int) -> bool:
        taken = super().take(size)
        self.peak = max(self.peak, self.held)
        return taken


def small(monkeypatch: pytest.MonkeyPatch, most: int, pool: Pool | None = None) -> list[Noting]:
    """Shares of so many bytes for servers that are made from now on."""
    made: list[Noting] = []

    def share() -> Noting:
        made.append(Noting(most, pool or Pool()))
        return made[-1]

    monkeypatch.setattr(wire, "Share", share)
    return made


async def test_a_session_that_fills_its_share_is_refused_in_its_apis_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = small(monkeypatch, len(LONG) + 100)
    async with gateway(["one", "two"]) as held:
        held.engine.hold.clear()
        key = {"Authorization": f"Bearer {held.session.token}"}
        async with httpx.AsyncClient(headers=key, timeout=60) as client:
            first = asyncio.create_task(client.post(f"{held.url}/v1/chat/completions", content=LONG))
            await eventually(lambda: held.engine.prompts, "a generation")
            hello: Any = [{"role": "user", "content": "hello " * 100}]
            async with openai_client(held) as theirs:
                with pytest.raises(openai.RateLimitError, match="try again") as caught:
                    await theirs.chat.completions.create(model="m", messages=hello)
                assert caught.value.code == "rate_limit_exceeded" and caught.value.response.headers["retry-after"]
            async with anthropic_client(held) as other:
                with pytest.raises(anthropic.RateLimitError, match="rate_limit_error"):
                    await other.messages.create(model="m", max_tokens=9, messages=hello)
            held.engine.hold.set()
            assert (await first).status_code == 200
            assert (await client.post(f"{held.url}/v1/chat/completions", content=LONG)).status_code == 200
        assert held.session.turns == 2 and held.session.failure is None
        await eventually(lambda: shares[0].held == 0, "nothing is held")


async def test_a_client_that_leaves_holds_nothing_once_its_answer_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = small(monkeypatch, 1 << 20)
    async with gateway(["one"]) as held:
        held.engine.hold.clear()
        whole, part = await sent(held, LONG), await sent(held, LONG[:-9])
        await eventually(lambda: held.engine.prompts and shares[0].held == 2 * len(LONG) - 9, "both have come")
        part.close()
        whole.close()
        await eventually(lambda: shares[0].held == len(LONG), "the part is forgotten")
        held.engine.hold.set()
        await eventually(lambda: shares[0].held == 0, "the answer is there")


async def sent(held: Gateway, body: bytes) -> asyncio.StreamWriter:
    """A connection on which a request's head and so much of its body are."""
    _, writer = await opened(held, body)
    return writer


async def opened(held: Gateway, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(held.url.rpartition(":")[2]))
    key = f"Authorization: Bearer {held.session.token}"
    writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{key}\r\nContent-Length: {len(LONG)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


async def test_in_a_full_process_every_body_comes_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(most=1)
    shares = small(monkeypatch, 1 << 20, pool)
    says: Callable[[list[int]], str] = lambda prompt: "ok"  # noqa: E731
    async with gateway(says) as held:
        both = [await opened(held, LONG[:600]) for _ in range(5)]
        await eventually(lambda: shares[0].held == 5 * 600, "all have begun")
        for _, writer in reversed(both):  # those that wait are not read: the first has to come to its end before
            writer.write(LONG[600:])
        for reader, writer in both:
            assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 200")
            writer.close()
        await eventually(lambda: pool.held == 0, "nothing is held")


async def test_a_body_that_does_not_come_in_time_is_dropped_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BODY_S", 0.05)
    shares = small(monkeypatch, 1 << 20)
    async with gateway([]) as held:
        reader, writer = await opened(held, LONG[:600])
        await eventually(lambda: shares[0].peak == 600 and shares[0].held == 0, "it came and was dropped")
        writer.write(LONG[600:])
        got = await asyncio.wait_for(reader.readuntil(b"}}"), 20)
        assert got.startswith(b"HTTP/1.1 503 ") and b"Retry-After" in got and b'"server_error"' in got
        writer.close()
        assert held.engine.prompts == [] and held.session.failure is None, "its own doing"


async def test_a_body_that_others_held_up_costs_the_rollout_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = small(monkeypatch, 1 << 20, Pool(most=1))
    async with gateway([]) as held:
        _, first = await opened(held, LONG[:600])
        await eventually(lambda: shares[0].held == 600, "the first has begun")
        monkeypatch.setattr(wire, "BODY_S", 0.05)
        _, second = await opened(held, LONG[:600])
        await eventually(lambda: held.session.failure, "the second was held up")
        assert "no room" in str(held.session.failure) and held.session.ended.is_set()
        first.close()
        second.close()
