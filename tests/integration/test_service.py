"""What the router offers beside JSON calls: server-sent events, its own description, and no 500 for any input."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from stages import beacon
from stages.client import AsyncRolloutClient
from stages.layout import RunLayout
from tests.support.routers import HandWorker, make_run, routed


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "run")


def url_of(layout: RunLayout) -> str:
    found = beacon.read(layout)
    assert found is not None
    return found.url


async def test_events_are_the_published_lines_and_resume_by_last_id(layout: RunLayout) -> None:
    headers = {"Authorization": f"Bearer {layout.trainer_token.read_text()}"}
    async with (
        routed(layout) as link,
        AsyncRolloutClient(layout.root) as trainer,
        httpx.AsyncClient(headers=headers, timeout=10) as client,
        client.stream("GET", f"{url_of(layout)}/v1/events?tag=blue") as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        await trainer.submit([{"task_id": "toy-1"}], tag="red")
        await trainer.submit([{"task_id": "toy-2"}], tag="blue")
        worker = HandWorker(link, "w-1-a")
        for stage in ("init", "run", "eval"):
            await worker.through(stage)
        lines = response.aiter_lines()
        seen = [line async for line in _until(lines, "event: group")]
        assert seen[0] == "retry: 1000"
        assert [line for line in seen if line.startswith("id: ")] == ["id: 3", "id: 4"]
        assert "event: rows" in seen and all("red" not in line for line in seen)
        resumed = {**headers, "Last-Event-ID": "3"}
        async with client.stream("GET", f"{url_of(layout)}/v1/events", headers=resumed) as again:
            rest = [line async for line in _until(again.aiter_lines(), "event: group")]
        assert [line for line in rest if line.startswith("id: ")] == ["id: 4"]


async def _until(lines, last):  # type: ignore[no-untyped-def]
    async for line in lines:
        yield line
        if line == last:
            return


async def test_a_body_of_200_mb_is_refused_before_it_is_read(layout: RunLayout) -> None:
    async def endless():  # type: ignore[no-untyped-def]
        for _ in range(200):
            yield b" " * (1 << 20)

    headers = {"Authorization": f"Bearer {layout.trainer_token.read_text()}", "Content-Type": "application/json"}
    async with routed(layout), httpx.AsyncClient(headers=headers, timeout=30) as client:
        assert b"too_large" in await announced(url_of(layout), headers, 200 << 20)
        with contextlib.suppress(httpx.WriteError):  # the router may close before all of it is sent
            assert (await client.post(f"{url_of(layout)}/v1/rollouts", content=endless())).status_code == 413
        assert (await client.get(f"{url_of(layout)}/readyz")).status_code == 200


async def announced(url: str, headers: dict[str, str], size: int) -> bytes:
    """The answer to a request that says how large its body will be and has sent none of it."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    sent = {**headers, "Host": where.netloc, "Content-Length": str(size), "Connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    writer.write(f"POST /v1/rollouts HTTP/1.1\r\n{lines}\r\n".encode())
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), 10)
    writer.close()
    assert b" 413 " in answer.split(b"\r\n")[0]
    return answer


async def test_a_token_may_come_as_a_password_for_clients_that_take_an_address_alone(layout: RunLayout) -> None:
    async with routed(layout), httpx.AsyncClient() as client:
        token = layout.trainer_token.read_text()
        url = url_of(layout)
        assert (await client.get(f"{url}/v1/policy", auth=("trainer", token))).status_code == 200
        assert (await client.get(f"{url}/v1/policy", auth=("trainer", token + "x"))).status_code == 401
        assert (await client.get(f"{url}/v1/lease", headers={"Authorization": "Basic ?"})).status_code in {401, 404}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunLayout]:
    """A router in a thread with a loop of its own."""
    layout = make_run(tmp_path_factory.mktemp("fuzzed") / "run")
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with routed(layout, prorl=True):
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(30)
    yield layout
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    loop.close()


@pytest.mark.filterwarnings("ignore")
def test_no_input_finds_a_500_or_an_answer_that_is_not_described(serving: RunLayout) -> None:
    """Every operation of /openapi.json, with what fits its schema and what does not; the seed is fixed."""
    url = url_of(serving)
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    tokens = {role: (serving.secrets / f"{role}.token").read_text() for role in ("trainer", "worker")}
    # Streams and calls that wait for a worker have their own tests; a drain would end admission for all the others.
    left_out = {"/v1/events", "/process", "/v1/drain"}
    bounded = settings(
        max_examples=8, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    called: set[str] = set()

    def check(case: schemathesis.Case, role: str, described: set[str]) -> None:
        if "wait_s" in (case.query or {}):
            case.query = {**case.query, "wait_s": 0}
        if isinstance(case.body, dict) and "wait_s" in case.body:
            case.body["wait_s"] = 0
        case.headers = {**(case.headers or {}), "Authorization": f"Bearer {tokens[role]}"}
        answer = case.call()
        assert answer.status_code not in {422, 500}, (case.method, case.path, case.query, case.body, answer.text)
        assert str(answer.status_code) in described, (case.path, answer.status_code)
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error["code"] and error["message"] and isinstance(error["detail"], dict)
        called.add(f"{case.method} {case.operation.path}")

    def calling(tested: Callable[[schemathesis.Case], None]) -> Callable[[schemathesis.Case], None]:
        return lambda case: tested(case)  # hypothesis takes functions alone

    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path not in left_out:
            raw = operation.definition.raw
            role = "worker" if "worker." in raw.get("description", "") else "trainer"
            tested = partial(check, role=role, described=set(raw["responses"]))
            bounded(given(case=operation.as_strategy())(calling(tested)))()
    assert len(called) >= 25
    with httpx.Client() as client:
        assert client.get(f"{url}/readyz").status_code == 200


PASSED_ON = frozenset({"authorization", "idempotency-key", "content-type"})


async def test_a_submission_whose_answer_is_lost_is_accepted_once_by_url_too(layout: RunLayout) -> None:
    """Something between client and router loses the first answer."""
    async with routed(layout) as link:
        target, lose = url_of(layout), [True]

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            headers = {name: value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
            size = int(next((v for n, v in headers.items() if n.lower() == "content-length"), 0))
            method, path, _ = lines[0].split(" ")
            async with httpx.AsyncClient(timeout=30) as client:
                kept = {name: value for name, value in headers.items() if name.lower() in PASSED_ON}
                answer = await client.request(
                    method, target + path, content=await reader.readexactly(size), headers=kept
                )
            if not (lose[0] and method == "POST"):
                after = answer.headers.get("x-next-after", "0")
                more = f"X-Next-After: {after}\r\nContent-Length: {len(answer.content)}\r\nConnection: close\r\n\r\n"
                writer.write(f"HTTP/1.1 {answer.status_code} X\r\n{more}".encode() + answer.content)
                await writer.drain()
            lose[0] = lose[0] and method != "POST"
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, AsyncRolloutClient(url, layout.trainer_token.read_text()) as trainer:
            (group,) = await trainer.submit([{"task_id": "toy-1"}])
            assert not lose[0], "the first answer was lost"
            worker = HandWorker(link, "w-1-a")
            for stage in ("init", "run", "eval"):
                await worker.through(stage)
            lines, _ = await trainer.results(wait_s=5)
            assert [line["group_id"] for line in lines] == [group["group_id"]]
            assert (await trainer.status())["rollouts"]["accepted"] == 1
