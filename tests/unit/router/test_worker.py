"""The worker's loops against a scripted router: what goes wrong with one result or answer does not end the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from sandbox.errors import SandboxError
from stages.errors import AgentError, LLMError, ServiceError
from stages.trajectory import RowRange
from stages.wire import CommitResult, CommitsIn, CommitsOut, HeartbeatOut, LeaseOut, LeasesOut, Revoked
from stages.worker import Leave, Result, Stagehand, Worker
from tests.support.waiting import eventually

SEGMENT = RowRange("handoff/x-0.seg", 0, 8, 1)


class ScriptedLink:
    """Grants the given leases once, refuses commits that `refuses` says, and remembers what was committed."""

    def __init__(self, count: int, refuses: Callable[[CommitsIn], bool] = lambda body: False) -> None:
        self.epoch = 1
        self._leases = [
            LeaseOut(str(i), f"g1-{i}", 1, "run", 30.0, msgspec.Raw(b"{}")) for i in range(1, count + 1)
        ]  # fmt: skip
        self._refuses = refuses
        self.commits: list[Any] = []
        self.revoke: list[Revoked] = []

    async def call(self, method: str, path: str, body: Any = None, *, answer: Any, **_: Any) -> Any:
        if path == "/v1/lease":
            leases, self._leases = self._leases[: body.free], self._leases[body.free :]
            if not leases:
                await asyncio.sleep(3600)
            return LeasesOut(1, leases)
        if path == "/v1/commit":
            msgspec.json.encode(body)
            if self._refuses(body):
                raise ServiceError(400, "invalid", "commits.segment: missing")
            self.commits += body.commits
            return CommitsOut([CommitResult(commit.lease_id, "ok") for commit in body.commits])
        revoked, self.revoke = self.revoke, []
        return HeartbeatOut(1, list(body.leases), revoked, False, 0)


class Hand(Stagehand):
    """Does what `work` says for each lease number."""

    timeout_class = "sandbox"

    def __init__(self, work: Callable[[int], Any]) -> None:
        self._work = work

    @property
    def warm(self) -> list[str]:
        return []

    async def work(self, lease: LeaseOut) -> Result:
        outcome = self._work(int(lease.lease_id))
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, float):
            await asyncio.sleep(outcome)
            return Result(segment=SEGMENT)
        return outcome


async def worked(link: ScriptedLink, hand: Hand, until: int) -> dict[str, Any]:
    """Run a worker until so many results are committed, then drain it."""
    worker = Worker(link, hand, member="run-1-x", stage="run", slots=8, heartbeat_s=0.05)  # type: ignore[arg-type]
    running = asyncio.create_task(worker.run(grace_s=5))
    await eventually(lambda: running.done() or len(link.commits) >= until, "the results are committed")
    worker.drain()
    await asyncio.wait_for(running, 10)
    return {commit.lease_id: commit for commit in link.commits}


async def test_each_boundary_has_its_class_and_never_ends_the_worker() -> None:
    faults: dict[int, Any] = {
        1: Result(segment=SEGMENT), 2: SandboxError("gone \udcff"), 3: LLMError("no answer", final=True),
        4: ValueError("a bug"), 5: TimeoutError(), 6: AgentError("raised where only a result may say so"),
    }  # fmt: skip
    link = ScriptedLink(6)
    commits = await worked(link, Hand(faults.__getitem__), 6)
    assert {n: c.outcome for n, c in commits.items()} == {
        "1": "ok", "2": "sandbox", "3": "llm", "4": "infrastructure", "5": "sandbox", "6": "infrastructure",
    }  # fmt: skip
    assert commits["3"].final is True and commits["2"].final is False
    assert commits["2"].message == "gone ?"


async def test_one_result_that_the_router_refuses_takes_no_other_with_it() -> None:
    def refuses(body: CommitsIn) -> bool:
        return any(commit.outcome == "ok" and commit.segment is None for commit in body.commits)

    link = ScriptedLink(4, refuses)
    commits = await worked(link, Hand(lambda n: Result(segment=None if n == 2 else SEGMENT)), 4)
    assert {n: c.outcome for n, c in commits.items()} == {"1": "ok", "2": "infrastructure", "3": "ok", "4": "ok"}


async def test_a_revoked_lease_is_stopped_and_not_committed() -> None:
    link = ScriptedLink(2)
    link.revoke = [Revoked("1", "cancelled")]
    commits = await worked(link, Hand(lambda n: 3600.0 if n == 1 else 0.3), 1)
    assert list(commits) == ["2"]


async def test_what_is_not_done_when_the_grace_is_over_is_given_back() -> None:
    link = ScriptedLink(1)
    worker = Worker(link, Hand(lambda n: 3600.0), member="run-1-x", stage="run", slots=1, heartbeat_s=0.05)  # type: ignore[arg-type]
    running = asyncio.create_task(worker.run(grace_s=0.2))
    await eventually(lambda: worker._tasks, "the lease is at work")
    worker.drain()
    await asyncio.wait_for(running, 10)
    assert [commit.outcome for commit in link.commits] == ["given_back"]


async def test_a_lease_that_came_when_the_worker_was_struck_is_given_back_as_well() -> None:
    link = ScriptedLink(4)
    worker = Worker(link, Hand(lambda n: 3600.0), member="run-1-x", stage="run", slots=4, heartbeat_s=9)  # type: ignore[arg-type]
    running = asyncio.create_task(worker.run(grace_s=5))
    while not worker._tasks:
        await asyncio.sleep(0)
    worker.abandon()  # none of them has taken its first step
    await asyncio.wait_for(running, 10)
    assert [commit.outcome for commit in link.commits] == ["given_back"] * 4


async def test_a_lease_without_a_slot_waits_and_is_given_back_when_the_worker_drains() -> None:
    begun: list[int] = []

    def work(number: int) -> float:
        begun.append(number)
        return 0.0 if number == 1 else 0.3

    class Generous(ScriptedLink):
        """Gives what it has, however little was asked for."""

        async def call(self, method: str, path: str, body: Any = None, *, answer: Any, **more: Any) -> Any:
            if path == "/v1/lease":
                body = msgspec.structs.replace(body, free=3)
            return await super().call(method, path, body, answer=answer, **more)

    link = Generous(3)
    worker = Worker(link, Hand(work), member="run-1-x", stage="run", slots=1, heartbeat_s=0.05)  # type: ignore[arg-type]
    running = asyncio.create_task(worker.run(grace_s=5))
    await eventually(lambda: 2 in begun, "the second has the slot of the first")
    worker.drain()
    await asyncio.wait_for(running, 10)
    assert begun == [1, 2]
    assert {c.lease_id: c.outcome for c in link.commits} == {"1": "ok", "2": "ok", "3": "given_back"}


async def test_work_that_has_left_its_slot_holds_up_nobody() -> None:
    """The first lease's work ends only when the second's has begun, in a worker of one slot."""
    second = asyncio.Event()

    class Leaving(Hand):
        def leaves(self, leave: Leave) -> None:
            self.leave = leave

        async def work(self, lease: LeaseOut) -> Result:
            if lease.lease_id == "1":
                self.leave(lease)
                await second.wait()
            second.set()
            return Result(segment=SEGMENT)

    link = ScriptedLink(2)
    worker = Worker(link, Leaving(lambda n: None), member="run-1-x", stage="run", slots=1, heartbeat_s=5.0)  # type: ignore[arg-type]
    running = asyncio.create_task(worker.run(grace_s=5))
    await eventually(lambda: len(link.commits) == 2, "both are committed")
    worker.drain()
    await asyncio.wait_for(running, 10)
