"""Callbacks: to allowed places alone, signed, told again until they are taken, by the next router where one dies."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stages.client import AsyncRolloutClient
from stages.errors import ServiceError
from stages.http import RouterLink
from stages.journal.history import read_events
from stages.layout import RunLayout
from stages.ledger.events import CalledBack
from stages.router import callbacks
from stages.router.callbacks import is_allowed
from tests.support.routers import HandWorker, make_run, routed
from tests.support.waiting import eventually


class Listener:
    """A trainer's own server: answers with `status` and keeps what it was told."""

    def __init__(self) -> None:
        self.status, self.url = 200, ""
        self.told: list[tuple[dict[str, str], bytes]] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            body = await reader.readexactly(int(headers["content-length"]))
            self.told.append((headers, body))
            there = f"Location: {self.url}/elsewhere\r\n" if self.status == 302 else ""
            writer.write(f"HTTP/1.1 {self.status} X\r\n{there}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    listener = Listener()
    server = await asyncio.start_server(listener.handle, "127.0.0.1", 0)
    listener.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield listener


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "BACKOFF_S", (0.05, 0.1))
    monkeypatch.setattr(callbacks, "LOOK_S", 0.02)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "run")


async def one_group(link: RouterLink, trainer: AsyncRolloutClient, url: str) -> dict[str, Any]:
    (group,) = await trainer.submit([{"task_id": "toy-1"}], group_size=2, callback_url=url)
    worker = HandWorker(link, "w-1-a")
    for stage in ("init", "run", "eval"):
        await worker.through(stage)
    return group


async def test_a_closed_group_is_told_once_with_its_rows_and_a_signature(layout: RunLayout) -> None:
    async with (
        listening() as listener,
        routed(layout, callbacks=(f"{listener.url}/done",)) as link,
        AsyncRolloutClient(layout.root) as trainer,
    ):
        group = await one_group(link, trainer, f"{listener.url}/done/here?step=3")
        await eventually(lambda: listener.told, "the callback")
        headers, body = listener.told[0]
        key = layout.callback_key.read_bytes().strip()
        assert headers["x-rollmill-signature"] == "sha256=" + hmac.new(key, body, hashlib.sha256).hexdigest()
        told = json.loads(body)
        assert told["group"]["group_id"] == group["group_id"] and told["group"]["closed_by"] == "complete"
        assert [row["rollout_id"] for row in told["rows"]] == group["rollout_ids"]
        lines, _ = await trainer.results(0, wait_s=5)
        assert lines == [told["group"]]
        await asyncio.sleep(0.3)
        assert len(listener.told) == 1


@pytest.mark.parametrize("status", [503, 302])
async def test_what_is_not_taken_is_told_again_and_by_the_next_router(layout: RunLayout, status: int) -> None:
    async with listening() as listener:
        listener.status = status
        async with (
            routed(layout, callbacks=(listener.url,)) as link,
            AsyncRolloutClient(layout.root) as trainer,
        ):
            await one_group(link, trainer, f"{listener.url}/done")
            await eventually(lambda: len(listener.told) >= 3, "tries")
        tries = len(listener.told)
        listener.status = 200
        async with routed(layout, callbacks=(listener.url,)):
            await eventually(lambda: called_back(layout), "the next router tells it")
        assert len(listener.told) == tries + 1
        async with routed(layout, callbacks=(listener.url,)):
            await asyncio.sleep(0.3)
        assert len(listener.told) == tries + 1, "what was taken is journaled"
        assert len({body for _, body in listener.told}) == 1


def called_back(layout: RunLayout) -> list[CalledBack]:
    return [event for event in read_events(layout) if isinstance(event, CalledBack)]


async def test_a_callback_that_nobody_takes_is_given_up(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "GIVEN_UP_S", 0.2)
    monkeypatch.setattr(callbacks.Callbacks.__init__, "__kwdefaults__", {"given_up_s": 0.2})
    async with listening() as listener:
        listener.status = 500
        async with (
            routed(layout, callbacks=(listener.url,)) as link,
            AsyncRolloutClient(layout.root) as trainer,
        ):
            group = await one_group(link, trainer, listener.url)
            (end,) = await eventually(lambda: called_back(layout), "it is given up")
            assert listener.told and end.failed == {group["group_id"]: "answered 500"}
            tries = len(listener.told)
            await asyncio.sleep(0.8)  # as long as it would be until the next try
            assert len(listener.told) == tries


async def test_a_callback_to_anywhere_else_is_refused(layout: RunLayout) -> None:
    async with routed(layout), AsyncRolloutClient(layout.root) as trainer:
        with pytest.raises(ServiceError, match=r"callbacks\.allow \(none\)") as caught:
            await trainer.submit([{"task_id": "toy-1"}], callback_url="http://127.0.0.1:9/")
        assert caught.value.status == 400


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://trainer:8000/cb", True),
        ("http://trainer:8000/cb/deep?x=1", True),
        ("http://TRAINER:8000/cb", True),
        ("http://trainer:8000/cbx", False),
        ("http://trainer:8000/", False),
        ("http://trainer/cb", False),
        ("https://trainer:8000/cb", False),
        ("http://trainer:8000@evil/cb", False),
        ("http://evil/http://trainer:8000/cb", False),
        ("http://trainer:8000/cb/../admin", False),
        ("http://trainer:8000/cb/%2e%2E/admin", False),
        ("http://trainer:8000/cb/%252e%252e/admin", False),
        ("http://trainer:8000/cb\\..\\admin", False),
        ("http://trainer:8000/cb\r\nX: y", False),
        ("http://trainer:eighty/cb", False),
        ("file:///etc/passwd", False),
        ("", False),
    ],
)
def test_allowed_is_the_same_place_and_below(url: str, allowed: bool) -> None:
    assert is_allowed(url, ["http://trainer:8000/cb"]) is allowed
