"""A router whose filesystem stalls or refuses: nothing is acknowledged meanwhile, no lease is lost, it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stages import beacon, control, sharedfs
from stages.client import AsyncRolloutClient
from stages.http import Client
from stages.journal.history import read_events
from stages.layout import RunLayout
from stages.ledger.events import Committed, Rules, Tick
from stages.syscalls import FileSystem
from tests.support.routers import HandWorker, make_run, routed
from tests.support.waiting import eventually

JSON = {"Content-Type": "application/json"}
STALL_S = 0.4
TTL_S = 1.5


class SickJournal(FileSystem):
    """Journal parts alone: `blocked` holds their fsyncs up, `code` refuses them, `short` cuts writes in half."""

    def __init__(self, journal: Path) -> None:
        self._journal = str(journal)
        self.healthy = threading.Event()
        self.healthy.set()
        self.code = 0
        self.short = False

    def _is_part(self, fd: int) -> bool:
        path = os.readlink(f"/proc/self/fd/{fd}")
        return os.path.dirname(path) == self._journal and "." not in os.path.basename(path)

    def fsync(self, fd: int) -> None:
        if self._is_part(fd):
            self.healthy.wait(20)
            if self.code:
                raise OSError(self.code, os.strerror(self.code))
        super().fsync(fd)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self.short and self._is_part(fd):
            return os.write(fd, memoryview(data)[: len(data) // 2])
        return super().write(fd, data)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "run")


@contextlib.asynccontextmanager
async def running(layout: RunLayout) -> AsyncIterator[tuple[SickJournal, HandWorker, list[dict[str, Any]]]]:
    """A router with a sick journal, and a worker that holds one RUN lease of two."""
    fs = SickJournal(layout.journal)
    rules = Rules(lease_ttl_s=TTL_S)
    async with routed(layout, rules=rules, stall_s=STALL_S) as link, AsyncRolloutClient(layout.root) as client:
        await client.submit([{"task_id": "toy-1"}], group_size=2, idempotency_key="one")
        worker = HandWorker(link, "run-1-x")
        await worker.through("init")
        leases = await worker.lease("run", free=1)
        with sharedfs.use(fs):
            try:
                yield fs, worker, leases
            finally:
                fs.healthy.set()


async def post(layout: RunLayout, path: str, body: dict[str, Any], role: str = "worker") -> tuple[int, str | None, str]:
    """One request, not repeated: its status, Retry-After, and error code."""
    found = beacon.read(layout)
    assert found is not None
    token = (layout.worker_token if role == "worker" else layout.trainer_token).read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    async with Client() as client:
        sent = msgspec.json.encode({"epoch": found.epoch, **body})
        answer = await client.post(f"{found.url}{path}", content=sent, headers={**headers, **JSON})
    error = answer.json().get("error", {}).get("code", "") if answer.status_code >= 400 else ""
    return answer.status_code, answer.headers.get("Retry-After"), error


def commit_body(lease: dict[str, Any]) -> dict[str, Any]:
    given = {k: lease[k] for k in ("lease_id", "rollout_id", "attempt")}
    segment = {"path": "handoff/x-0.seg", "offset": 0, "length": 8, "crc32": 1}
    return {"member": "run-1-x", "commits": [given | {"outcome": "ok", "segment": segment}]}


async def test_an_fsync_that_hangs_past_the_lease_time_costs_an_answer_and_no_lease(layout: RunLayout) -> None:
    async with running(layout) as (fs, worker, leases):
        fs.healthy.clear()
        began = time.monotonic()
        body = commit_body(leases[0])
        waiting = await post(layout, "/v1/commit", body)
        assert (waiting[0], waiting[2]) == (503, "journal_stalled") and int(waiting[1] or 0) > 0
        ask = {"member": "m2", "stage": "run", "free": 1, "wait_s": 0.0}
        assert await post(layout, "/v1/lease", ask) == (503, "2", "journal_stalled")
        refused = await post(layout, "/v1/heartbeat", {"member": "run-1-x", "leases": [leases[0]["lease_id"]]})
        assert refused[0] == 503
        await eventually(lambda: time.monotonic() > began + 2 * TTL_S, "the stall outlasts every lease")
        assert sum(isinstance(event, Tick) for event in read_events(layout)) == 0
        fs.healthy.set()
        assert await worker.commit(leases[0]) == "already"
        assert len(await worker.lease("run")) == 1
        assert await worker.through("eval") == ["ok"]
    committed = [e for e in read_events(layout) if isinstance(e, Committed) and e.member == "run-1-x"]
    assert sum(item.lease == int(leases[0]["lease_id"]) for e in committed for item in e.commits) >= 1


async def test_a_lease_that_is_held_through_a_stall_is_still_held_after_it(layout: RunLayout) -> None:
    async with running(layout) as (fs, worker, leases):
        fs.healthy.clear()
        other = asyncio.create_task(post(layout, "/v1/drain", {}, "trainer"))
        began = time.monotonic()
        await eventually(lambda: time.monotonic() > began + 2 * TTL_S, "the stall outlasts every lease")
        fs.healthy.set()
        await other
        answer = await worker.heartbeat([leases[0]["lease_id"]])
        assert answer["renewed"] == [leases[0]["lease_id"]]


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, "short"])
async def test_a_disk_that_refuses_is_told_and_gone_on_with_when_it_is_well_again(
    layout: RunLayout, fault: int | str
) -> None:
    async with running(layout) as (fs, worker, leases):
        fs.code, fs.short = (0, True) if fault == "short" else (int(fault), False)
        answer = await post(layout, "/v1/commit", commit_body(leases[0]))
        assert (answer[0], answer[2]) == (503, "journal_stalled")
        fs.code, fs.short = 0, False
        assert await worker.commit(leases[0]) == "already"
        (second,) = await worker.lease("run")
        assert await worker.commit(second) == "ok"
    times = [event.t for event in read_events(layout)]
    assert times == sorted(times)
    ended = [item.lease for e in read_events(layout) if isinstance(e, Committed) for item in e.commits]
    assert sorted(set(ended)) == sorted({int(leases[0]["lease_id"]), int(second["lease_id"]), 1})


async def test_a_key_that_comes_again_is_not_answered_before_the_first_is_durable(layout: RunLayout) -> None:
    async with running(layout) as (fs, _, _):
        fs.healthy.clear()
        body = {"tasks": [{"task_id": "toy-2"}], "group_size": 1}
        first = asyncio.create_task(submit(layout, body))
        await eventually(first.done, "the first is given up")
        assert first.result() == 503 and await submit(layout, body) == 503
        fs.healthy.set()
        await eventually(lambda: ready(layout), "the router is well again")
        assert await submit(layout, body) == 202
    assert sum(len(e.groups) for e in read_events(layout) if hasattr(e, "groups") and hasattr(e, "n")) == 2


async def submit(layout: RunLayout, body: dict[str, Any]) -> int:
    found = beacon.read(layout)
    assert found is not None
    headers = {
        "Authorization": f"Bearer {layout.trainer_token.read_text().strip()}", "Idempotency-Key": "again",
    }  # fmt: skip
    async with Client() as client:
        url = f"{found.url}/v1/rollouts"
        return (await client.post(url, content=msgspec.json.encode(body), headers={**headers, **JSON})).status_code


async def ready(layout: RunLayout) -> bool:
    found = beacon.read(layout)
    assert found is not None
    async with Client() as client:
        return (await client.get(f"{found.url}/readyz")).status_code == 200


async def test_what_the_router_itself_decides_in_a_stall_stands_and_does_not_end_it(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that goes, and a drain that is asked for by file: nobody waits for an answer that could be refused."""
    for name in ("replicas.PROBE_S", "service.CONTROL_S", "core.STALL_CHECK_S"):
        monkeypatch.setattr(f"stages.router.{name}", 0.05)
    well = True

    @contextlib.asynccontextmanager
    async def probes() -> AsyncIterator[Callable[[str], Awaitable[bool]]]:
        async def probe(url: str) -> bool:
            return well

        yield probe

    monkeypatch.setattr("stages.router.service.health_probe", probes)
    async with running(layout) as (fs, _, _), AsyncRolloutClient(layout.root, patience_s=1.0) as trainer:
        await trainer.add_replica("http://127.0.0.1:9")
        fs.healthy.clear()
        well = False
        control.request(layout.root, "drain")

        async def decided() -> bool:
            now = await trainer.status()
            return now["state"] == "draining" and now["fleet"][0]["state"] == "down"

        await eventually(decided, "both are known to the router")
        began = time.monotonic()
        await eventually(lambda: time.monotonic() > began + 2 * STALL_S, "the stall is one")
        fs.healthy.set()
        assert (await trainer.status())["epoch"] == 1


async def test_a_request_by_file_that_cannot_be_looked_for_is_looked_for_again(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.router.service.CONTROL_S", 0.05)
    refused = []

    def pending(layout: RunLayout, name: control.Request) -> bool:
        if len(refused) < 3:
            refused.append(name)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return layout.control_request(name).exists()

    monkeypatch.setattr(control, "pending", pending)
    async with routed(layout), AsyncRolloutClient(layout.root, patience_s=1.0) as trainer:
        await trainer.submit([{"task_id": "toy-1"}])
        control.request(layout.root, "cancel")

        async def cancelled() -> bool:
            return bool((await trainer.status())["rollouts"]["cancelled"])

        await eventually(cancelled, "it was found all the same")
