"""The gateway's HTTP as clients of every kind write it, and what is no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from stages.errors import RolloutError
from stages.gateway import answering
from stages.gateway import server as wire
from tests.support.gateways import Gateway, gateway

BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()


async def raw(held: Gateway, *parts: bytes, until: bytes) -> bytes:
    """What comes back for these bytes, up to a text in it or the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(held.url.rpartition(":")[2]))
    got = b""
    async with asyncio.timeout(60):
        for part in parts:
            writer.write(part)
            await writer.drain()
        while until not in got:
            more = await reader.read(65536)
            if not more:
                break
            got += more
    writer.close()
    return got


def head(held: Gateway, *lines: str) -> bytes:
    key = f"Authorization: Bearer {held.session.token}"
    return "\r\n".join(["POST /v1/chat/completions HTTP/1.1", "Host: x", key, *lines, "", ""]).encode()


async def test_bodies_in_chunks_and_bodies_that_wait_for_leave() -> None:
    async with gateway(["one", "two"]) as held:
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:9], BODY[9:])) + b"0\r\n\r\n"
        got = await raw(held, head(held, "Transfer-Encoding: chunked"), chunks, until=b'"total_tokens"')
        assert b"200 OK" in got and b'"content":"one"' in got
        asked = head(held, f"Content-Length: {len(BODY)}", "Expect: 100-continue")
        got = await raw(held, asked, BODY, until=b'"total_tokens"')
        assert got.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


async def test_requests_sent_at_once_are_answered_in_order() -> None:
    async with gateway(["one", "two", "three"]) as held:
        one = head(held, f"Content-Length: {len(BODY)}") + BODY
        last = head(held, f"Content-Length: {len(BODY)}", "Connection: close") + BODY
        got = await raw(held, one + one + last, until=b"nothing: it closes")
        assert got.count(b"HTTP/1.1 200 OK") == 3 and got.index(b'"one"') < got.index(b'"two"') < got.index(b'"three"')


async def test_what_is_no_request_is_refused_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway([]) as held:
        assert (await raw(held, b"hello\r\n\r\n", until=b"}}")).startswith(b"HTTP/1.1 400 Bad Request")
        got = await raw(held, head(held, "X-Long: " + "x" * 70_000), until=b"}}")
        assert got.startswith(b"HTTP/1.1 413 ") and b"head is larger" in got
        monkeypatch.setattr(wire, "MAX_BODY", 100)
        got = await raw(held, head(held, "Content-Length: 200"), b"x" * 200, until=b"}}")
        assert got.startswith(b"HTTP/1.1 413 ") and b"body is larger" in got
        assert held.engine.prompts == []


async def test_a_long_turn_keeps_its_stream_alive_and_ends_it_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "QUIET_S", 0.01)
    async with gateway([RolloutError("no engine")]) as held:
        held.engine.hold.clear()
        body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()
        waiting = asyncio.create_task(raw(held, head(held, f"Content-Length: {len(body)}"), body, until=b"0\r\n\r\n"))
        while not held.engine.prompts:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.1, held.engine.hold.set)
        got = await waiting
        assert got.startswith(b"HTTP/1.1 200 OK") and got.count(b": ping") >= 2
        assert b'data: {"error":{"message":"the policy does not answer"' in got and got.endswith(b"0\r\n\r\n")


async def test_a_fault_of_the_gateway_itself_is_an_answer_and_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(["one"]) as held:
        monkeypatch.setattr(held.session._capture, "_read", lambda *_: 1 / 0)
        got = await raw(held, head(held, f"Content-Length: {len(BODY)}"), BODY, until=b"}}")
        assert got.startswith(b"HTTP/1.1 500 ")
        assert held.session.failure is not None and held.session.failure.failure_class == "infrastructure"


async def test_an_answer_that_closed_its_connection_was_delivered() -> None:
    async with gateway(["one", "two"]) as held:
        asked = head(held, f"Content-Length: {len(BODY)}", "Connection: close") + BODY
        first = await raw(held, asked, until=b"nothing: it closes")
        second = await raw(held, asked, until=b"nothing: it closes")
        assert b'"content":"one"' in first and b'"content":"two"' in second and held.session.turns == 2


async def test_an_offer_of_another_protocol_is_declined() -> None:
    async with gateway(["one", "two"]) as held:
        offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
        asked = head(held, *offer, f"Content-Length: {len(BODY)}")
        got = await raw(held, asked + BODY[:9], BODY[9:], until=b'"total_tokens"')
        assert got.startswith(b"HTTP/1.1 200 OK") and b'"content":"one"' in got
        got = await raw(held, asked.replace(b"Upgrade,", b"close, Upgrade,"), BODY, until=b"nothing: it closes")
        assert got.startswith(b"HTTP/1.1 200 OK") and b'"content":"two"' in got
        got = await raw(held, b"CONNECT x:1 HTTP/1.1\r\n\r\n", until=b"}}")
        assert got.startswith(b"HTTP/1.1 405 ")


async def test_offers_without_end_are_declined_one_after_the_other() -> None:
    async with gateway([]) as held:
        offer = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        last = b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n"
        got = await raw(held, offer * 600 + last, until=b"nothing: it closes")
        assert got.count(b"HTTP/1.1 401 ") == 601


@pytest.mark.parametrize("start", [b"POST /" + b"x" * 70_000, b"POST / HTTP/1.1\r\nX-Long: " + b"x" * 70_000])
async def test_a_head_that_never_ends_is_refused(start: bytes) -> None:
    async with gateway([]) as held:
        got = await raw(held, start, until=b"}}")
        assert got.startswith(b"HTTP/1.1 413 ") and b"head is larger" in got


async def test_strangers_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[int] = []
    on_body = wire._Connection.on_body

    def counted(self: wire._Connection, body: bytes) -> None:
        on_body(self, body)
        bodies.append(sum(map(len, self._body)))

    monkeypatch.setattr(wire._Connection, "on_body", counted)
    async with gateway([]) as held:
        asked = b"POST /v1/responses HTTP/1.1\r\nX-Api-Key: wrong\r\nContent-Length: 200000\r\n\r\n"
        got = await raw(held, asked, b"x" * 200_000, until=b"}}")
        assert got.startswith(b"HTTP/1.1 401 ") and bodies and max(bodies) == 0
        got = await raw(held, asked.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"), until=b"}}")
        assert got.startswith(b"HTTP/1.1 401 ")
        monkeypatch.setattr(wire, "STRANGER_S", 0.01)
        assert await raw(held, b"POST ", until=b"nothing: it closes") == b""
        monkeypatch.setattr(wire, "MAX_CONNECTIONS", 0)
        with contextlib.suppress(ConnectionResetError):
            assert await raw(held, head(held, f"Content-Length: {len(BODY)}"), BODY, until=b"}}") == b""
        assert held.engine.prompts == []


async def test_a_request_that_breaks_the_gateway_gets_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(["one", "two"]) as held:
        dialect = type(answering.ROUTES["/v1/chat/completions"])
        asked = head(held, f"Content-Length: {len(BODY)}") + BODY
        with monkeypatch.context() as broken:
            broken.setattr(dialect, "write", lambda *_: 1 / 0)
            got = await raw(held, asked, until=b"}}")
        assert got.startswith(b"HTTP/1.1 500 ") and b"the gateway broke" in got
        body = json.dumps({"input": "hello", "text": {"format": "json"}}).encode()
        refused = head(held, f"Content-Length: {len(body)}").replace(b"/chat/completions", b"/responses") + body
        got = await raw(held, refused, until=b"}}")
        assert got.startswith(b"HTTP/1.1 400 ") and b"text.format" in got
        body = json.dumps({"input": [{"type": "item_reference", "id": "msg_1"}]}).encode()
        refused = head(held, f"Content-Length: {len(body)}").replace(b"/chat/completions", b"/responses") + body
        assert b"item_reference" in await raw(held, refused, until=b"}}")
        assert held.session.failure is None
