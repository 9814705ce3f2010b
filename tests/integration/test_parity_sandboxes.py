"""Public bugs of the field about what RUN touches: real sandboxes that die or are cancelled, engines that refuse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.bubblewrap import BubblewrapBackend
from sandbox.protocols import Sandbox
from stages.client import AsyncRolloutClient
from stages.engine_client import EngineClient
from stages.layout import RunLayout
from stages.ledger.events import Rules
from stages.protocols import Row
from tests.integration.sandbox.test_worker_death import descendants, mounts_naming
from tests.support.pools import TurnsAgent, run_pool, until_closed, versioned_engine, working
from tests.support.routers import make_run, routed
from tests.support.waiting import eventually

SEED = 20
POINTS = 50


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "run")


@contextlib.asynccontextmanager
async def refusing_engine(message: str, asked: Counter[str]) -> AsyncIterator[str]:
    """An engine that answers every generation with 400 and `message`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = [line for line in head.lower().splitlines() if line.startswith("content-length:")]
                await reader.readexactly(int(length[0].split(":")[1]) if length else 0)
                path = head.split()[1]
                asked[path] += 1
                status, body = "200 OK", '{"data":[{"id":"tiny","max_model_len":4096}]}'
                if path.endswith("/generate"):
                    status, body = "400 Bad Request", f'{{"error":{{"message":"{message}"}}}}'
                writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


class At:
    """An engine client that asks one URL, whatever replica the session names."""

    def __init__(self, engine: EngineClient, url: str) -> None:
        self._engine, self._url = engine, url

    async def context_length(self, url: str) -> int:
        return await self._engine.context_length(self._url)

    async def generate(self, url: str, *args: Any, **options: Any) -> Any:
        return await self._engine.generate(self._url, *args, **options)


@pytest.mark.parametrize(
    ("message", "status", "failure_class"),
    [
        ("This model's maximum context length is 4096 tokens", "completed", "context_length"),
        ("sampling_params: unknown field", "failed", "llm"),
    ],
)
async def test_b04_an_engine_that_answers_400_is_asked_exactly_once(
    layout: RunLayout, message: str, status: str, failure_class: str
) -> None:
    asked: Counter[str] = Counter()
    async with (
        refusing_engine(message, asked) as url,
        EngineClient() as engine,
        routed(layout, rules=Rules(max_attempts=5)),
        AsyncRolloutClient(layout.root) as trainer,
    ):
        await trainer.submit([{"task_id": "toy-1"}])
        async with working(layout, "init"), run_pool(layout, TurnsAgent(), At(engine, url)), working(layout, "eval"):
            (row,) = (await until_closed(trainer, 1))[0].values()
        retries = (await trainer.status())["retries"]
    assert (row["status"], row["failure_class"]) == (status, failure_class)
    assert (asked["/inference/v1/generate"], retries) == (1, 0)


async def test_b08_rollouts_cancelled_at_fifty_points_leave_nothing_behind(layout: RunLayout, tmp_path: Path) -> None:
    """Each rollout's sandbox has files, a background process and a command; it is cancelled wherever it is then."""
    draw = random.Random(SEED)
    scratch = tmp_path / "scratch"

    async def act(row: Row, turn: int, sandbox: Sandbox) -> None:
        await sandbox.shell.run("sleep 300 & head -c 100000 /dev/zero > big; mkdir -p deep/er")
        await sandbox.shell.run("sleep 300", timeout_s=300)

    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(routed(layout, max_open=100))
        trainer = await stack.enter_async_context(AsyncRolloutClient(layout.root))
        async with BubblewrapBackend(scratch) as backend, working(layout, "init"):
            before = descendants(os.getpid())
            async with run_pool(layout, TurnsAgent(1, act), versioned_engine(), slots=6, backend=backend) as pool:
                groups = await trainer.submit([{"task_id": f"toy-{i}"} for i in range(POINTS // 2)], group_size=2)
                for group in groups:
                    await asyncio.sleep(draw.uniform(0.0, 0.12))
                    if draw.random() < 0.5:
                        await trainer.cancel(group_id=group["group_id"])
                        continue
                    for rollout_id in group["rollout_ids"]:
                        await trainer.cancel(rollout_id=rollout_id)
                        await asyncio.sleep(draw.uniform(0.0, 0.06))
                rows, _ = await until_closed(trainer, POINTS // 2)
                assert not pool.task.done()
                assert {row["status"] for row in rows.values()} == {"cancelled"} and len(rows) == POINTS
                await eventually(lambda: not _sandboxes(scratch), "no sandbox is left while the worker lives")
                await eventually(lambda: _spawned(before) == [], "no process is left while the worker lives")
                assert mounts_naming(str(scratch)) == []
    assert list(scratch.rglob("*")) == [] and not list(layout.root.rglob("*.tmp"))


def _sandboxes(scratch: Path) -> list[str]:
    return [place for place, directories, files in os.walk(scratch) if "big" in files or "deep" in directories]


def _spawned(before: set[int]) -> list[str]:
    """What the sandboxes' processes are called: the backend's own helper may stay, for the next sandbox."""
    commands = [_command(pid) for pid in descendants(os.getpid()) - before]
    return [command for command in commands if command and "spawner" not in command]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


async def test_b33_a_lost_sandbox_is_a_masked_failure_and_never_reward_zero(layout: RunLayout, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"

    async def act(row: Row, turn: int, sandbox: Sandbox) -> None:
        if row["task_id"] == "toy-1":
            await sandbox.shell.run("sleep 271", timeout_s=60)
            await sandbox.shell.run("true")

    async def destroy_sandboxes() -> None:
        """Processes and files: as when the node's scratch goes away; a killed shell alone is started again."""
        while True:
            for pid in descendants(os.getpid()):
                command = _command(pid)
                if command.startswith("bwrap --bind ") and "sleep 271 " in map(_command, descendants(pid)):
                    shutil.rmtree(Path(command.split()[2]).parent, ignore_errors=True)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.05)

    rules = Rules(max_attempts=2)
    async with routed(layout, rules=rules), AsyncRolloutClient(layout.root) as trainer:
        await trainer.submit([{"task_id": "toy-1"}, {"task_id": "toy-2"}])
        async with (
            BubblewrapBackend(scratch) as backend,
            working(layout, "init"),
            working(layout, "eval"),
            run_pool(layout, TurnsAgent(1, act), versioned_engine(), backend=backend),
        ):
            killing = asyncio.create_task(destroy_sandboxes())
            rows, _ = await until_closed(trainer, 2)
            killing.cancel()
        status = await trainer.status()
    by_task = {row["task_id"]: row for row in rows.values()}
    dead, alive = by_task["toy-1"], by_task["toy-2"]
    assert (dead["status"], dead["failure_class"], dead["mask_sample"]) == ("failed", "sandbox", True)
    assert dead["reward"] is None and dead["shard"] is None
    assert alive["status"] == "completed" and status["reward"] == {"mean": 1.0, "n": 1}
    assert status["infra_failure_ratio"] == 0.5 and status["failures"] == {"sandbox": 1}
