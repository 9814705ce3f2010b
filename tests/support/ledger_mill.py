"""A router's heart under a made-up load, in a process of its own: what tests.bench.ledger starts, kills and reads.

`acked DIR SECONDS` prints `rate ...` once and, until it is killed, the crc of each event that was acknowledged.
`fill DIR ROLLOUTS` runs so many to their end and closes in order; `tail DIR EVENTS` adds events without a snapshot,
prints `done` and waits to be killed. `reopen DIR` opens the run and prints how long that took and what it needed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from stages.ledger import events, grants
from stages.ledger.events import (
    AnyEvent,
    CommitItem,
    Committed,
    GroupSpec,
    Heartbeat,
    Leased,
    ReplicaChanged,
    Rules,
    SessionOpened,
    Submitted,
)
from stages.ledger.state import EVAL, INIT, RUN, Lease
from stages.router.core import Router
from stages.router.places import group_name
from stages.trajectory import RowRange
from stages.web import run
from tests.support.routers import make_run

N = 4
RULES = Rules(lease_ttl_s=600.0, ready_buffer=4096)
NEVER = 1 << 40
LAYER = "sha256:" + "ab" * 32


class Mill:
    """Sends groups of N rollouts of one environment through INIT, RUN and EVAL by events alone."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._names = itertools.count()

    def put(self, event: AnyEvent) -> asyncio.Future[Any]:
        return self._router.put(event)

    async def begin(self) -> None:
        """A replica, and the one environment's layer."""
        self.put(ReplicaChanged(t=self._router.clock(), replica="replica-1", change="join", url="http://x", model="m"))
        await self.group("worker-0")
        await self.leased(INIT, "worker-0", 1)

    async def group(self, member: str, count: int = 1) -> None:
        """Submit groups."""
        router = self._router
        first = router.ledger.state.next_group
        specs = []
        for number in range(first, first + count):
            row = {"task_id": f"arith-{number}", "question": f"{number} + 7 - 4 = ?", "answer": number + 3}
            specs.append(GroupSpec(group_name(number), row["task_id"], router.payloads.stage(row), "env-0"))
        await self.put(
            Submitted(t=router.clock(), groups=specs, n=N, tag="train", key=f"step-{first}", body_digest="d")
        )

    async def leased(self, stage: str, member: str, free: int, batch: int = 2) -> int:
        """Lease work of a stage, keep it alive, and commit it `batch` at a time; returns how much there was."""
        router = self._router
        work = grants.choose(router.ledger, stage, free)
        if not work:
            return 0
        leases: list[Lease] = await self.put(Leased(t=router.clock(), member=member, stage=stage, work=work))
        if stage == RUN:
            for lease in leases:
                self.put(
                    SessionOpened(t=router.clock(), rollout_id=lease.work, attempt=lease.attempt, replica="replica-1")
                )
        mine = list(router.ledger.state.members[member])
        await self.put(Heartbeat(t=router.clock(), member=member, leases=mine))
        for start in range(0, len(leases), batch):
            items = [self.result(lease) for lease in leases[start : start + batch]]
            await self.put(Committed(t=router.clock(), member=member, commits=items))
        return len(leases)

    def result(self, lease: Lease) -> CommitItem:
        where = RowRange(f"{lease.stage}/{lease.member}-0.seg", 4096 * lease.id, 4000, zlib.crc32(lease.work.encode()))
        timing = {"service_s": 1.2345, "llm_s": 1.1111, "tool_s": 0.0123}
        if lease.stage == INIT:
            return CommitItem(lease=lease.id, outcome="ok", layer=LAYER, **timing)  # type: ignore[arg-type]
        if lease.stage == RUN:
            return CommitItem(lease=lease.id, outcome="ok", segment=where, min_policy_version=3, **timing)  # type: ignore[arg-type]
        return CommitItem(
            lease=lease.id, outcome="ok", row=where, reward=1.0, min_policy_version=3, chains=1, tokens=900, **timing  # type: ignore[arg-type]
        )  # fmt: skip


class Witnessed(Mill):
    """Notes the crc of each event once it is acknowledged."""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self.acked: list[int] = []
        self.count = 0

    def put(self, event: AnyEvent) -> asyncio.Future[Any]:
        crc = zlib.crc32(events.encode(event))
        durable = super().put(event)
        durable.add_done_callback(lambda done: self._note(crc, done))
        return durable

    def _note(self, crc: int, done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.acked.append(crc)
            self.count += 1


def opened(directory: Path, snapshot_events: int) -> Any:
    return Router.opened(make_run(directory), "bench", RULES, "node", snapshot_events=snapshot_events)


async def acked(directory: Path, seconds: float, clients: int = 384) -> None:
    async with opened(directory, 100_000) as router:
        mill = Witnessed(router)
        await mill.begin()

        async def client(number: int) -> None:
            member = f"run-{number}-node0042-7f3a9c2e"
            while True:
                await mill.group(member)
                for stage in (RUN, EVAL):
                    await mill.leased(stage, member, N)

        rates: list[dict[str, float]] = []

        async def tell() -> None:
            while True:
                await asyncio.sleep(0.02)
                crcs, mill.acked = mill.acked, []
                said = [b"%08x\n" % crc for crc in crcs] + [b"rate %b\n" % json.dumps(rate).encode() for rate in rates]
                rates.clear()
                await asyncio.to_thread(os.write, 1, b"".join(said))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(tell())
            for number in range(clients):
                tasks.create_task(client(number))
            await asyncio.sleep(min(1.0, seconds / 4))
            started, cpu, before, size = time.perf_counter(), time.process_time(), mill.count, router.journal.bytes
            await asyncio.sleep(seconds)
            spent_s, cpu_s, count = time.perf_counter() - started, time.process_time() - cpu, mill.count - before
            rates.append({
                "acked_events_per_s": count / spent_s,
                "cpu_us_per_event": 1e6 * cpu_s / count,
                "bytes_per_event": (router.journal.bytes - size) / count,
            })  # fmt: skip


async def fill(directory: Path, rollouts: int, snapshot_events: int = 100_000) -> None:
    async with opened(directory, snapshot_events) as router:
        mill = Mill(router)
        if router.epoch == 1:
            await mill.begin()
        until = router.ledger.state.counts.completed + rollouts

        async def client(number: int) -> None:
            member = f"run-{number}-node0042-7f3a9c2e"
            while router.ledger.state.counts.completed < until:
                await mill.group(member, 8)
                for stage in (RUN, EVAL):
                    await mill.leased(stage, member, 8 * N, 8)

        await asyncio.gather(*(client(number) for number in range(64)))


async def tail(directory: Path, count: int) -> None:
    async with opened(directory, NEVER) as router:
        mill = Mill(router)

        async def client(number: int) -> None:
            member = f"run-{number}-node0042-7f3a9c2e"
            while router.journal.events < count:
                await mill.group(member)
                for stage in (RUN, EVAL):
                    await mill.leased(stage, member, N)

        await asyncio.gather(*(client(number) for number in range(64)))
        print("done", flush=True)
        await asyncio.Event().wait()


async def reopen(directory: Path) -> None:
    started = time.perf_counter()
    async with opened(directory, NEVER) as router:
        spent_s = time.perf_counter() - started
        counts = router.ledger.state.counts
        found = {
            "reopen_s": spent_s,
            "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "replayed": router.replayed,
            "completed": counts.completed,
            "open": len(router.ledger.state.rollouts),
            "accepted": counts.accepted,
        }
        last = await router.publisher.line(router.publisher.published)
        assert last["seq"] == router.publisher.published
        print(json.dumps(found), flush=True)


def main() -> None:
    command, directory, *numbers = sys.argv[1:]
    calls = {"acked": acked, "fill": fill, "tail": tail, "reopen": reopen}
    run(calls[command](Path(directory), *map(int, numbers)))  # type: ignore[operator]


if __name__ == "__main__":
    main()
