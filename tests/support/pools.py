"""Real workers in the test's own process: stages of a test's own making, and the real RUN and EVAL hands."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from sandbox.fake import FakeBackend
from sandbox.protocols import Sandbox, SandboxBackend
from stages.chat import ChatTokenizer
from stages.client import AsyncRolloutClient
from stages.engine_client import Completion
from stages.handoff import SegmentWriter
from stages.http import RouterLink
from stages.layout import RunLayout, StoreLayout
from stages.pools.eval import EvalHand, RunNames
from stages.pools.run import Policy, RunHand, Saving
from stages.protocols import Limits, Model, Reward, Row
from stages.shards.writer import ShardWriter
from stages.store import LayerStore
from stages.trajectory import Message, ModelIdentity, RowRange, Sampling, Trajectory, VersionSpan
from stages.wire import CommitRow, LeaseOut, Stage
from stages.worker import Result, Stagehand, Worker
from tests.support.routers import ToyTask

POLICY = Path(__file__).parents[2] / "workflows" / "policies" / "tiny"
DONE: dict[str, Result] = {
    "init": Result(layer=""),
    "run": Result(segment=RowRange("handoff/toy-1-x-0.seg", 0, 8, 1)),
    "eval": Result(row=CommitRow("shards/toy-1-x-0.arrows", 0, 8, 1, 1.0)),
}
"""What a stage commits that made nothing: empty layers, ranges that nobody reads."""


class ToyHand(Stagehand):
    """A stage whose work is `body`; without one every lease is done at once."""

    timeout_class = "infrastructure"

    def __init__(self, stage: Stage, body: Callable[[LeaseOut], Awaitable[Result | None]] | None = None) -> None:
        self._stage, self._body = stage, body
        self.leases: list[LeaseOut] = []

    @property
    def warm(self) -> list[str]:
        return []

    async def work(self, lease: LeaseOut) -> Result:
        self.leases.append(lease)
        result = await self._body(lease) if self._body is not None else None
        return result if result is not None else DONE[self._stage]


class LivingWorker:
    """A worker that runs in this loop."""

    def __init__(self, worker: Worker, grace_s: float) -> None:
        self.worker = worker
        self.task = asyncio.create_task(worker.run(grace_s=grace_s))

    async def drain(self) -> None:
        """As on SIGTERM: hand back what is not done within the grace, and end."""
        self.worker.drain()
        await self.task


@contextlib.asynccontextmanager
async def working(
    layout: RunLayout, stage: Stage, hand: Stagehand | None = None, *, member: str | None = None, slots: int = 64,
    heartbeat_s: float = 0.1, grace_s: float = 0.05, patience_s: float = 10,
) -> AsyncIterator[LivingWorker]:  # fmt: skip
    """A worker of a stage; without a hand of its own it does everything at once."""
    async with RouterLink("worker", run_dir=layout.root, patience_s=patience_s) as link:
        worker = Worker(
            link, hand or ToyHand(stage), member=member or f"{stage}-1-toy", stage=stage, slots=slots,
            heartbeat_s=heartbeat_s,
        )  # fmt: skip
        living = LivingWorker(worker, grace_s)
        try:
            yield living
        finally:
            if not living.task.done():
                await living.drain()


async def until_closed(
    trainer: AsyncRolloutClient, groups: int, timeout_s: float = 30.0
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Index lines once so many groups have closed: rows by rollout id, and the group lines."""
    rows: dict[str, dict[str, Any]] = {}
    closed: list[dict[str, Any]] = []
    after = 0
    async with asyncio.timeout(timeout_s):
        while len(closed) < groups:
            lines, after = await trainer.results(after, wait_s=5, rows=True)
            for line in lines:
                if line["type"] == "group":
                    closed.append(line)
                else:
                    assert line["rollout_id"] not in rows, "a second row of one rollout"
                    rows[line["rollout_id"]] = line
    return rows, closed


# -- the real hands over a scripted policy ----------------------------------------------------------------------------


class PlainTask(ToyTask):
    """The toy task as a whole one: whatever the agent left is right."""

    def prompt(self, row: Row) -> list[Message]:
        return [Message("user", row["question"])]

    def tools(self, row: Row) -> list[dict[str, Any]]:
        return []

    async def prepare(self, sandbox: Sandbox, row: Row) -> None: ...

    async def verify(self, sandbox: Sandbox, row: Row, trajectory: Trajectory) -> Reward:
        return Reward(1.0)

    async def solve(self, sandbox: Sandbox, row: Row) -> str | None:
        return None


class TurnsAgent:
    """Asks the policy `turns` times; `act` is awaited before each turn with the row, the turn and the sandbox."""

    name = "turns"
    privileged = False

    def __init__(self, turns: int = 1, act: Callable[[Row, int, Sandbox], Awaitable[None]] | None = None) -> None:
        self._turns, self._act = turns, act

    async def run(self, row: Row, model: Model, sandbox: Sandbox, limits: Limits) -> None:
        messages = [Message("user", row["question"])]
        for turn in range(self._turns):
            if self._act is not None:
                await self._act(row, turn, sandbox)
            messages += [await model.generate(messages=messages), Message("user", "go on")]


class VersionedEngine:
    """Answers every prompt with the same few tokens, sampled by the version that it has then."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)
        self.version = 0

    async def context_length(self, url: str) -> int:
        return 4096

    async def generate(
        self, url: str, token_ids: Sequence[int], sampling: Sampling, *, name: str, timeout_s: float
    ) -> Completion:
        await asyncio.sleep(0.005)
        spans = [VersionSpan(self.version, 0, len(self._ids))]
        return Completion(self._ids, [-0.5] * len(self._ids), "stop", spans, 0, 0.005)


def versioned_engine() -> VersionedEngine:
    """An engine that says "ok" and ends its turn."""
    chat = ChatTokenizer.load(POLICY)
    return VersionedEngine([*chat.encode("ok"), *chat.encode("<|im_end|>")])


@contextlib.asynccontextmanager
async def healthy() -> AsyncIterator[str]:
    """The URL of a replica that is asked for its health and steered alone: these tests call the engine in process."""
    body = b'{"success":true,"is_paused":false}'

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@contextlib.asynccontextmanager
async def run_pool(
    layout: RunLayout, agent: TurnsAgent, engine: Any, *, member: str = "run-1-toy", slots: int = 64,
    backend: SandboxBackend | None = None, segments: SegmentWriter | None = None, visibility_s: float = 10,
    **options: Any,
) -> AsyncIterator[LivingWorker]:  # fmt: skip
    """A RUN worker with the real hand; the sandbox is a fake one where none is given."""
    chat = ChatTokenizer.load(POLICY)
    store = toy_store(layout)
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(healthy())
        link = await stack.enter_async_context(RouterLink("worker", run_dir=layout.root, patience_s=10))
        body = {"url": url, "model": "tiny", "capacity": 256, "id": "replica-1"}
        await link.call("POST", "/v1/replicas", body, answer=bytes)
        backend = backend or await stack.enter_async_context(FakeBackend(layout.root))
        segments = segments or await stack.enter_async_context(SegmentWriter(layout, member))
        hand = RunHand(
            PlainTask(), agent, Limits(), Policy(chat, ModelIdentity("tiny")), backend=backend, store=store,
            engine=engine, link=link, segments=segments,
            saving=Saving(layout, layout.root.parent, visibility_s=visibility_s),
        )  # fmt: skip
        yield await stack.enter_async_context(working(layout, "run", hand, member=member, slots=slots, **options))


@contextlib.asynccontextmanager
async def eval_pool(layout: RunLayout, *, member: str = "eval-1-toy") -> AsyncIterator[LivingWorker]:
    """An EVAL worker with the real hand: real rows in real shards."""
    names = RunNames("toy-run", "collect", "toy", "turns")
    async with FakeBackend(layout.root) as backend, ShardWriter(layout, member) as shards:
        hand = EvalHand(
            PlainTask(), names, layout, backend=backend, store=toy_store(layout), shards=shards,
            scratch=layout.root, visibility_s=10,
        )  # fmt: skip
        async with working(layout, "eval", hand, member=member) as living:
            yield living


def toy_store(layout: RunLayout) -> LayerStore:
    """A layer store beside the run."""
    store = LayerStore(StoreLayout(layout.root.parent / "store"), layout.root.parent / "unpacked")
    store.prepare(layout.root)
    return store
