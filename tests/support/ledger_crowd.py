"""Rollouts through three stages over real HTTP: a router in one process, 64 real worker loops in another.

`router DIR` serves until it is killed; `workers DIR ROLLOUTS` submits, works, waits for the last result and prints
rollouts a second and the router's CPU milliseconds a rollout. Stages do nothing but what the protocol asks of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from stages import beacon
from stages.client import AsyncRolloutClient
from stages.http import RouterLink
from stages.layout import RunLayout
from stages.ledger.events import Rules
from stages.router.served import ServedTask
from stages.router.service import serve
from stages.trajectory import RowRange
from stages.web import run
from stages.wire import CommitRow, LeaseOut, SessionIn, SessionOut
from stages.worker import Result, Stagehand, Worker
from tests.support.routers import ToyTask, make_run, options

GROUP_SIZE = 8
TASKS = 64
POOL = {"init": (4, 8), "run": (40, 16), "eval": (20, 16)}
"""Workers and slots of each."""


class Hand(Stagehand):
    """Does what a stage tells the router, and nothing else."""

    timeout_class = "infrastructure"

    def __init__(self, stage: str, member: str, link: RouterLink) -> None:
        self._stage, self._member, self._link = stage, member, link

    @property
    def warm(self) -> list[str]:
        return []

    async def work(self, lease: LeaseOut) -> Result:
        if self._stage == "init":
            return Result(layer="sha256:" + "1" * 64)
        if self._stage == "run":
            opened = SessionIn(rollout_id=lease.rollout_id, attempt=lease.attempt)
            await self._link.call("POST", "/v1/sessions", opened, answer=SessionOut)
            segment = RowRange(f"handoff/{self._member}-0.seg", 0, 4000, 7)
            return Result(segment=segment, min_policy_version=0, llm_s=0.1, tool_s=0.01)
        row = CommitRow(f"shards/{self._member}-0.arrows", 0, 4000, 7, reward=1.0, min_policy_version=0, tokens=900)
        return Result(row=row)


async def router(directory: Path) -> None:
    served = ServedTask(ToyTask(1), lambda image: "sha256:0", privileged_agent=False)
    given = options(rules=Rules(lease_ttl_s=60.0, ready_buffer=1024), max_open=1_000_000)
    await serve(make_run(directory), served, given, asyncio.Event())


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def healthy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
    await writer.drain()
    writer.close()


async def workers(directory: Path, rollouts: int) -> None:
    replica = await asyncio.start_server(healthy, "127.0.0.1", 0)
    port = replica.sockets[0].getsockname()[1]
    found = beacon.read(RunLayout(directory))
    assert found is not None
    async with AsyncRolloutClient(directory) as client, asyncio.TaskGroup() as tasks:
        await client.add_replica(f"http://127.0.0.1:{port}", capacity=4096)
        crowd = [
            tasks.create_task(_worker(directory, stage, number, slots))
            for stage, (count, slots) in POOL.items()
            for number in range(count)
        ]
        await asyncio.sleep(1.0)
        cpu, started = cpu_s(found.pid), time.perf_counter()
        submitting = tasks.create_task(_submit(client, rollouts))
        ended, after = 0, 0
        while ended < rollouts:
            lines, after = await client.results(after, wait_s=10, rows=True)
            ended += sum(line["type"] == "rows" and line["status"] == "completed" for line in lines)
        spent_s, cpu = time.perf_counter() - started, cpu_s(found.pid) - cpu
        await submitting
        for task in crowd:
            task.cancel()
    print(json.dumps({"rollouts_per_s": rollouts / spent_s, "router_cpu_ms_per_rollout": 1000 * cpu / rollouts}))


async def _submit(client: AsyncRolloutClient, rollouts: int) -> None:
    for start in range(0, rollouts // GROUP_SIZE, TASKS):
        tasks = [
            {"task_id": f"t{n}", "data": {"question": f"{n} + 1 = ?", "answer": n + 1, "env": str(n % 8)}}
            for n in range(start, min(start + TASKS, rollouts // GROUP_SIZE))
        ]
        await client.submit(tasks, group_size=GROUP_SIZE, idempotency_key=f"step-{start}")


async def _worker(directory: Path, stage: str, number: int, slots: int) -> None:
    member = f"{stage}-{number}-node0042-7f3a9c2e"
    async with RouterLink("worker", run_dir=directory) as link:
        await link.locate()
        hand = Hand(stage, member, link)
        worker = Worker(link, hand, member=member, stage=stage, slots=slots, heartbeat_s=5.0)  # type: ignore[arg-type]
        await worker.run(grace_s=1.0)


def main() -> None:
    command, directory, *numbers = sys.argv[1:]
    if command == "router":
        run(router(Path(directory)))
    else:
        run(workers(Path(directory), int(numbers[0])))


if __name__ == "__main__":
    main()
