"""The HTTP client against servers that answer as they are told: kept connections, every way to break, its limits."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import uvloop

import stages.http_client
from stages.connection import HEAD_BYTES, AnswerError
from stages.http import Client, ConnectError, InvalidURL, ReadError, RequestTimeout, TransportError
from stages.http_client import split_url
from tests.support.waiting import eventually

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


@dataclass
class Server:
    """Answers the n-th request of the n-th connection as `answers` says; then closes."""

    answers: Callable[[int, bytes], bytes | None]
    url: str = ""
    connections: int = 0
    open: int = 0
    requests: list[bytes] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0
                )
                request = head + (await reader.readexactly(length) if length else b"")
                self.requests.append(request)
                answer = self.answers(len(self.requests), request)
                if answer is None:
                    return
                if answer == b"never":
                    continue
                writer.write(answer)
                await writer.drain()
                if b"close" in answer:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def serving(answers: Callable[[int, bytes], bytes | None]) -> AsyncIterator[Server]:
    one = Server(answers)
    server = await asyncio.start_server(one.handle, "127.0.0.1", 0)
    one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield one
    finally:
        server.close()


async def test_a_request_says_what_it_was_given_and_a_response_is_whole() -> None:
    body = "ä" * 70_000
    fields = f"X-Next-After: 7\r\nvia: a\r\nVia: b\r\nContent-Length: {2 * len(body)}"
    answer = f"HTTP/1.1 418 Short And Stout\r\n{fields}\r\n\r\n"
    async with serving(lambda *_: answer.encode() + body.encode()) as server, Client() as client:
        response = await client.request(
            "PUT", f"{server.url}/a b?c=ü#x", content=b"{}", headers={"Idempotency-Key": "k"}
        )
    (request,) = server.requests
    lines = request.decode().split("\r\n")
    assert lines[0] == "PUT /a%20b?c=%C3%BC HTTP/1.1"
    assert {f"Host: {server.url[7:]}", "Content-Length: 2", "Idempotency-Key: k", "Accept-Encoding: identity"} < set(
        lines
    )
    assert lines[-1] == "{}"
    assert (response.status_code, response.reason_phrase, response.text) == (418, "Short And Stout", body)
    assert response.headers.get("x-next-after") == response.headers["X-Next-After"] == "7"
    assert response.headers.get("VIA") == "a, b" and "Via" in response.headers
    assert response.headers.get("retry-after", "0") == "0"


async def test_a_connection_is_kept_and_used_again_one_request_at_a_time() -> None:
    async with serving(lambda *_: OK) as server, Client() as client:
        for _ in range(3):
            assert (await client.post(server.url, content=b"x")).content == b"hi"
        assert server.connections == 1
        await asyncio.gather(*(client.get(server.url) for _ in range(5)))
        assert server.connections <= 5
    await eventually(lambda: server.open == 0, "connections ended with the client")


def test_the_router_calls_others_on_another_kind_of_loop() -> None:
    async def main() -> None:
        async with serving(lambda *_: OK) as server, Client() as client:
            for _ in range(2):
                assert (await client.post(server.url, content=b"x")).content == b"hi"
            assert server.connections == 1
        async with Client() as client:
            with pytest.raises(ConnectError):
                await client.get(server.url)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_a_connection_that_was_idle_too_long_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(lambda *_: OK) as server, Client() as client:
        await client.get(server.url)
        monkeypatch.setattr(stages.http_client, "KEEP_ALIVE_S", 0.0)
        await client.post(server.url, content=b"x")
        assert server.connections == 2
        await eventually(lambda: server.open == 1, "the old connection is given back")


async def test_a_burst_does_not_hold_its_connections_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.http_client, "KEEP_ALIVE_S", 0.2)
    async with serving(lambda *_: OK) as server, Client() as client:
        await asyncio.gather(*(client.get(server.url) for _ in range(8)))
        assert len(client._open) > 1
        await eventually(lambda: server.open == 0 and not client._open, "all are given back")
        await client.get(server.url)
        await eventually(lambda: server.open == 0, "and the next one too")


async def test_no_more_connections_than_allowed_and_the_oldest_goes_for_another_host() -> None:
    async with serving(lambda *_: OK) as one, serving(lambda *_: OK) as other, Client(connections=2) as client:
        await asyncio.gather(*(client.get(one.url) for _ in range(8)))
        assert one.connections == 2
        await client.get(other.url)
        await eventually(lambda: one.open == 1, "room was made")
        assert len(client._open) == 2


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\n\r\n"
TO_THE_END = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhi"
CONTINUED = b"HTTP/1.1 100 Continue\r\nX-First: 1\r\n\r\n" + OK
ZIPPED = b"HTTP/1.1 200 OK\r\nContent-Encoding: GZip\r\nContent-Length: %d\r\n\r\n" % len(gzip.compress(b"hi", mtime=0))
DEFLATED = b"HTTP/1.1 200 OK\r\nContent-Encoding: deflate\r\nContent-Length: %d\r\n\r\n" % len(zlib.compress(b"hi"))


@pytest.mark.parametrize(
    "answer", [CHUNKED, TO_THE_END, CONTINUED, ZIPPED + gzip.compress(b"hi", mtime=0), DEFLATED + zlib.compress(b"hi")]
)
async def test_every_way_to_frame_an_answer(answer: bytes) -> None:
    async with serving(lambda *_: answer) as server, Client() as client:
        response = await client.get(server.url)
        assert response.content == b"hi"
        assert "X-First" not in response.headers


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\nhi", "in the middle"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: close\r\n\r\n5\r\nhi", "in the middle"),
        (b"HTTP/1.1 200 close", "in the middle"),
        (None, "before its answer"),
    ],
)
async def test_a_torn_answer_is_none(answer: bytes | None, said: str) -> None:
    async with serving(lambda *_: answer) as server, Client() as client:
        with pytest.raises(ReadError, match=said):
            await client.post(server.url, content=b"x")
        assert len(server.requests) == 1
        assert not client._open


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"220 smtp.example.org ESMTP\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * (2 * HEAD_BYTES), "head is larger"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n" + bytes(101), "larger than 100 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 2\r\n\r\nhi", "'br', which was not asked for"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nhi", "does not decode"),
        (b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n", "no HTTP"),
    ],
)
async def test_an_answer_that_cannot_be_taken_ends_its_connection(answer: bytes, said: str) -> None:
    async with serving(lambda *_: answer) as server, Client(answer_bytes=100) as client:
        with pytest.raises(AnswerError, match=said):
            await client.get(server.url)
        await eventually(lambda: server.open == 0, "the connection ended")


async def test_a_bomb_is_not_unpacked() -> None:
    packed = gzip.compress(bytes(10 << 20))
    answer = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    async with serving(lambda *_: answer + packed) as server, Client(answer_bytes=1 << 20) as client:
        with pytest.raises(AnswerError, match="larger than 1048576 bytes decoded"):
            await client.get(server.url)


async def test_what_follows_an_answer_unasked_is_never_taken_for_the_next_one() -> None:
    async with serving(lambda *_: OK + OK.replace(b"hi", b"no")) as server, Client() as client:
        for _ in range(3):
            assert (await client.post(server.url, content=b"x")).content == b"hi"
        assert server.connections == 3


async def test_only_what_changes_nothing_is_sent_once_more_into_another_connection() -> None:
    """The server ends a kept connection just as the next request comes."""
    async with serving(lambda number, _: None if number % 3 == 2 else OK) as server, Client() as client:
        await client.get(server.url)
        assert (await client.get(server.url)).content == b"hi"
        assert len(server.requests) == 3
        await client.post(server.url, content=b"x")  # the fourth
        with pytest.raises(ReadError):
            await client.post(server.url, content=b"x")
        assert len(server.requests) == 5


async def test_a_deadline_tells_whether_anything_was_sent() -> None:
    async with serving(lambda number, _: OK if number == 1 else b"never") as server, Client(connections=1) as client:
        await client.get(server.url)  # what follows is sent at once, in the same connection
        with pytest.raises(RequestTimeout, match=r"no whole answer within 0\.05 s"):
            await client.post(server.url, content=b"x", timeout=0.05)
        await eventually(lambda: server.open == 0, "the server sees that we have gone")
        first = asyncio.create_task(client.post(server.url, content=b"x"))
        await eventually(lambda: len(server.requests) == 3, "the only turn is taken")
        with pytest.raises(ConnectError, match=r"no connection within 0\.05 s"):
            await client.post(server.url, content=b"x", timeout=0.05)
        assert len(server.requests) == 3
        first.cancel()


async def test_who_gives_up_takes_his_connection_along_and_frees_his_turn() -> None:
    async with serving(lambda number, _: b"never" if number == 1 else OK) as server, Client(connections=1) as client:
        asking = asyncio.create_task(client.get(server.url))
        await eventually(lambda: len(server.requests) == 1, "asked")
        asking.cancel()
        assert (await client.get(server.url)).content == b"hi"
        assert server.connections == 2
        assert len(client._open) == 1


async def test_a_dead_port_is_a_connection_that_was_not_made() -> None:
    async with serving(lambda *_: OK) as server:
        url = server.url
    async with Client() as client:
        with pytest.raises(ConnectError):
            await client.get(url)
    with pytest.raises(ConnectError, match="closed"):
        await client.get(url)


async def test_requests_in_flight_fail_when_the_client_is_closed() -> None:
    async with serving(lambda *_: b"never") as server:
        client = Client()
        asking = asyncio.create_task(client.get(server.url))
        await eventually(lambda: len(server.requests) == 1, "asked")
        await client.aclose()
        with pytest.raises(TransportError):
            await asking


@pytest.mark.parametrize(
    "url",
    [
        "",
        "router:80/x",
        "ftp://a/b",
        "http://",
        "http:///x",
        "http://a b/",
        "http://u:p@a/",
        "http://a:99999/",
        "http://a\r\nb/",
    ],
)
async def test_what_names_nobody_is_refused_before_anything_is_sent(url: str) -> None:
    async with Client() as client:
        with pytest.raises(InvalidURL):
            await client.get(url)


@pytest.mark.parametrize(
    ("url", "host", "port", "named", "target"),
    [
        ("http://a.b", "a.b", 80, "a.b", "/"),
        ("HTTP://a.b:8000/v1/x?y=1#z", "a.b", 8000, "a.b:8000", "/v1/x?y=1"),
        ("https://a.b?q", "a.b", 443, "a.b", "/?q"),
        ("http://[::1]:80/", "::1", 80, "[::1]:80", "/"),
        ("http://bücher.de/ü\r\nX: 1", "bücher.de", 80, "xn--bcher-kva.de", "/%C3%BC%0D%0AX:%201"),
    ],
)
def test_whom_a_url_names(url: str, host: str, port: int, named: str, target: str) -> None:
    origin, asked = split_url(url)
    assert (origin.host, origin.port, origin.named, asked) == (host, port, named, target)


@pytest.mark.parametrize(("name", "value"), [("X", "a\r\nY: b"), ("X Y", "a"), ("", "a"), ("X", "\N{SNOWMAN}")])
async def test_a_header_cannot_smuggle_another(name: str, value: str) -> None:
    async with Client() as client:
        with pytest.raises(ValueError):
            await client.get("http://127.0.0.1:1", headers={name: value})


async def test_certificates_are_read_when_the_first_https_address_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = stages.http_client._context

    def counted() -> ssl.SSLContext:
        read.append(1)
        return real()

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    monkeypatch.setattr(stages.http_client, "_context", counted)
    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with Client() as client:
        with pytest.raises(ReadError):
            await client.get(f"http://{place}")
        assert read == []
        for _ in range(2):  # it speaks no TLS
            with pytest.raises(ConnectError):
                await client.get(f"https://{place}")
        assert read == [1]
    server.close()
