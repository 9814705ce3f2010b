"""Assignment: how fast in process and over HTTP, and how fairly, by scenarios that other routers were put to."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from stages import beacon
from stages.client import AsyncRolloutClient
from stages.http import RouterLink
from stages.layout import RunLayout
from stages.ledger.events import GroupSpec, ReplicaChanged, SessionClosed, SessionOpened, Submitted
from stages.ledger.fleet import Fleet
from stages.ledger.machine import Ledger
from stages.router.readings import Pressure, Reading
from tests.bench import gateway
from tests.bench.report import emit
from tests.bench.routers.thrash import LIVE, SESSIONS, compared
from tests.support.mock_engine import MockEngine
from tests.support.routers import HandWorker
from tests.support.waiting import poll

REPLICAS = 8
CONNECTIONS = 64
GATEWAY = ("gateway_added_p50_ms", "gateway_requests_per_s", "gateway_cpu_ms_per_request")


def _fleet(count: int, capacity: int = 1000) -> Fleet:
    fleet = Fleet()
    for number in range(count):
        fleet.change(f"r{number}", "join", f"http://r{number}", "m", capacity, "")
    return fleet


def _open(fleet: Fleet, names: list[str]) -> list[str]:
    chosen = []
    for name in names:
        replica = fleet.choose()
        assert replica is not None
        fleet.open(name, 1, replica)
        chosen.append(replica)
    return chosen


def assign_inproc_per_s(sessions: int) -> float:
    """Assignments through the ledger (choice, event, release), 512 open at a time."""
    ledger = Ledger()
    for number in range(REPLICAS):
        ledger.apply(ReplicaChanged(t=1.0, replica=f"r{number}", change="join", url=f"http://r{number}", capacity=64))
    ledger.apply(Submitted(t=1.0, groups=[GroupSpec("g", "t", "p", "e")], n=512))
    rollouts = [f"g-{number}" for number in range(512)]
    started = time.perf_counter()
    for number in range(sessions):
        rollout = rollouts[number % len(rollouts)]
        replica = ledger.state.fleet.choose()
        assert replica is not None
        session = ledger.apply(SessionOpened(t=1.0, rollout_id=rollout, attempt=number, replica=replica))[0]
    spent_s = time.perf_counter() - started
    ledger.apply(SessionClosed(t=1.0, session=session.id))
    return sessions / spent_s


def fairness() -> dict[str, float]:
    """Spread over idle replicas, what a joiner gets, and what becomes of who has a session already."""
    idle = Counter(_open(_fleet(REPLICAS), [f"s{n}" for n in range(1000)]))
    fleet = _fleet(REPLICAS)
    _open(fleet, [f"old{n}" for n in range(200)])
    before = dict(fleet.sessions)
    fleet.change("joiner", "join", "http://joiner", "m", 1000, "")
    share = _open(fleet, [f"new{n}" for n in range(200)]).count("joiner")
    kept = [name for name, session in before.items() if fleet.usable(name, 1) == session]
    return {
        "idle_spread": max(idle.values()) - min(idle.values()),
        "joiner_share": share,
        "sessions_moved": len(before) - len(kept),
        "affinity": len(kept) / len(before),
    }


def overfull_share(sessions: int, live: int = 64) -> float:
    """Share of new sessions that a replica gets whose metrics say that its cache is full; one look every 2 s.

    Sessions come and go, 50 a second; as many of a replica's run as it has tokens for, the others wait: the first
    holds 6,000 tokens, the others 200,000, and a session needs 4,500.
    """
    fleet, pressure, now = _fleet(REPLICAS), Pressure(0.9), 0.0
    holds = {f"r{n}": 6_000.0 if n == 0 else 200_000.0 for n in range(REPLICAS)}
    got: Counter[str] = Counter()
    warm_up = live
    for number in range(sessions + warm_up):
        if number % 100 == 0:
            for replica in fleet.replicas.values():
                running = min(replica.in_flight, holds[replica.id] // 4_500)
                use = running * 4_500 / holds[replica.id]
                reading = Reading(running, replica.in_flight - running, use)
                pressure.read(replica.id, reading, replica.in_flight, now)
        chosen = fleet.choose(pressure.avoided(now))
        assert chosen is not None
        fleet.open(f"s{number}", 1, chosen)
        pressure.opened(chosen)
        if number >= warm_up:
            got[chosen] += 1
        if number >= live:
            fleet.release(f"s{number - live}")
        now += 0.02
    return got["r0"] / sessions


async def _replies(port: int, requests: list[bytes]) -> list[bytes]:
    """Send requests one after the other over one connection; their bodies."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    bodies = []
    for request in requests:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.partition(b"\r\n")[0].decode())
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        bodies.append(await reader.readexactly(length))
    writer.close()
    return bodies


async def _assign_over_http(directory: Path, sessions: int) -> dict[str, float]:
    found = beacon.read(RunLayout(directory))
    assert found is not None
    port = int(found.url.rpartition(":")[2])
    async with (
        contextlib.AsyncExitStack() as stack,
        AsyncRolloutClient(directory) as trainer,
        RouterLink("worker", run_dir=directory) as link,
    ):
        await link.locate()
        for _ in range(REPLICAS):
            engine = await stack.enter_async_context(MockEngine())
            await trainer.add_replica(engine.url, capacity=sessions)
        tasks = [{"task_id": f"t{n}", "data": {"question": "?"}} for n in range(sessions // 64)]
        await trainer.submit(tasks, group_size=64)
        worker = HandWorker(link, "bench-1-a")
        await worker.through("init")
        leases: list[dict[str, object]] = []
        while len(leases) < sessions // 64 * 64:
            leases += await worker.lease("run", free=1024)
        token = RunLayout(directory).worker_token.read_text().strip()
        requests = []
        for lease in leases:
            body = json.dumps({"rollout_id": lease["rollout_id"], "attempt": lease["attempt"]})
            head = f"POST /v1/sessions HTTP/1.1\r\nHost: r\r\nAuthorization: Bearer {token}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            requests.append((head + body).encode())
        started = time.perf_counter()
        bodies = await asyncio.gather(*(_replies(port, requests[n::CONNECTIONS]) for n in range(CONNECTIONS)))
        opened_s = time.perf_counter() - started
        started = time.perf_counter()
        again = await asyncio.gather(*(_replies(port, requests[n::CONNECTIONS]) for n in range(CONNECTIONS)))
        asked_s = time.perf_counter() - started
    given = Counter(json.loads(body)["replica_id"] for each in bodies for body in each)
    return {
        "assign_http_per_s": len(requests) / opened_s,
        "ask_again_http_per_s": len(requests) / asked_s,
        "http_spread": max(given.values()) - min(given.values()),
        "http_affinity": float(bodies == again),
    }


def over_http(directory: Path, sessions: int) -> dict[str, float]:
    """Sessions a second that one router gives, each durable before its answer; and asked for again."""
    command = [sys.executable, "-P", "-m", "tests.support.ledger_crowd", "router", str(directory)]
    with subprocess.Popen(command) as router:
        try:
            poll(lambda: beacon.read(RunLayout(directory)), "the router publishes itself", 60, 0.05)
            return asyncio.run(_assign_over_http(directory, sessions))
        finally:
            router.kill()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    given = parser.parse_args(arguments)
    results: dict[str, float] = {"assign_inproc_per_s": assign_inproc_per_s(5_000 if given.quick else 100_000)}
    results |= fairness()
    results["overfull_share"] = overfull_share(2_000 if given.quick else 20_000)
    with tempfile.TemporaryDirectory() as scratch:
        results |= over_http(Path(scratch) / "run", 1024 if given.quick else 8192)
    thrash, peers = compared(LIVE if given.quick else SESSIONS)
    results |= thrash
    ratios = {f"thrash_x_{name}": thrash["thrash_s"] / found["thrash_s"] for name, found in peers.items()}
    captured, errors, _ = gateway.measure(quick=given.quick, names=("gateway",))
    results |= {key: captured[key] for key in GATEWAY}
    errors += [f"{key} is {results[key]}" for key in ("sessions_moved",) if results[key]]
    return emit("router", results, peers=peers, ratios=ratios, errors=errors, as_json=given.json)


if __name__ == "__main__":
    raise SystemExit(main())
