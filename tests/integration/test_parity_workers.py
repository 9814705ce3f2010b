"""Public bugs of the field, with the real router over HTTP and the real worker loops in one process."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from stages.client import AsyncRolloutClient
from stages.handoff import SegmentWriter, read_record
from stages.journal.history import read_events
from stages.layout import RunLayout
from stages.ledger.events import Committed, Leased, Rules
from stages.ledger.machine import Ledger
from stages.shards import ShardReader
from stages.wire import LeaseOut, Stage
from stages.worker import Result
from tests.support.pools import ToyHand, TurnsAgent, eval_pool, run_pool, until_closed, versioned_engine, working
from tests.support.routers import HandWorker, make_run, routed
from tests.support.waiting import eventually
from tests.unit.stages_files.samples import make_result


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "run")


def own_environments(count: int) -> list[dict[str, object]]:
    return [{"task_id": f"t{i}", "data": {"question": "?", "env": f"e{i}"}} for i in range(count)]


def leased(layout: RunLayout, stage: str) -> list[str]:
    return [
        work for event in read_events(layout) if isinstance(event, Leased) and event.stage == stage
        for work in event.work
    ]  # fmt: skip


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
async def test_b01_one_rollout_that_raises_in_a_stage_leaves_the_other_63_alone(
    layout: RunLayout, stage: Stage
) -> None:
    odd: list[str] = []

    async def breaks(lease: LeaseOut) -> None:
        if lease.rollout_id == odd[0]:
            raise ValueError(f"broken on purpose in {stage}")

    async with routed(layout, rules=Rules(max_attempts=2)), AsyncRolloutClient(layout.root) as trainer:
        groups = await trainer.submit(own_environments(64))
        odd += groups[7]["rollout_ids"]
        hands = {name: ToyHand(name, breaks if name == stage else None) for name in ("init", "run", "eval")}
        async with (
            working(layout, "init", hands["init"]),
            working(layout, "run", hands["run"]),
            working(layout, "eval", hands["eval"]),
        ):
            rows, closed = await until_closed(trainer, 64)
    assert len(closed) == 64
    broken = rows.pop(odd[0])
    assert (broken["status"], broken["failure_class"], broken["mask_sample"]) == ("failed", "infrastructure", True)
    assert len(rows) == 63 and {row["status"] for row in rows.values()} == {"completed"}
    assert "ValueError: broken on purpose" in layout.failures.read_text()
    assert sum(lease.rollout_id == odd[0] for lease in hands[stage].leases) == 2


async def test_b02_a_run_pool_ten_times_slower_than_init_sees_a_bounded_buffer(layout: RunLayout) -> None:
    async def quick(lease: LeaseOut) -> None:
        await asyncio.sleep(0.005)

    async def slow(lease: LeaseOut) -> None:
        await asyncio.sleep(0.05)

    async with routed(layout, rules=Rules(ready_buffer=6)), AsyncRolloutClient(layout.root) as trainer:
        await trainer.submit(own_environments(60))
        async with (
            working(layout, "init", ToyHand("init", quick), slots=8),
            working(layout, "run", ToyHand("run", slow), slots=2),
            working(layout, "eval"),
        ):
            await until_closed(trainer, 60)
    ledger, most = Ledger(), 0
    for event in read_events(layout):
        ledger.apply(event)
        most = max(most, sum(r.held or (r.stage == "run" and r.attempt == 0) for r in ledger.state.rollouts.values()))
    assert 2 <= most <= 6


async def test_b03_a_drained_worker_hands_its_rollouts_on_and_none_counts_as_failed(layout: RunLayout) -> None:
    async def for_ever(lease: LeaseOut) -> None:
        await asyncio.sleep(3600)

    async with routed(layout, rules=Rules(max_attempts=1)), AsyncRolloutClient(layout.root) as trainer:
        await trainer.submit([{"task_id": f"toy-{i}"} for i in range(8)], group_size=2)
        async with working(layout, "init"), working(layout, "eval"):
            stuck = ToyHand("run", for_ever)
            async with working(layout, "run", stuck, slots=5, member="run-1-old") as old:
                await eventually(lambda: len(stuck.leases) == 5, "five rollouts run")
                await old.drain()
            async with working(layout, "run", member="run-1-new"):
                rows, _ = await until_closed(trainer, 8)
        status = await trainer.status()
    assert {row["status"] for row in rows.values()} == {"completed"} and len(rows) == 16
    assert (status["failures"], status["infra_failure_ratio"]) == ({}, 0.0)
    ran = leased(layout, "run")
    assert sorted(ran) == sorted([*rows, *(lease.rollout_id for lease in stuck.leases)])


async def test_b05_what_superseded_attempts_left_stays_readable(layout: RunLayout) -> None:
    async with (
        routed(layout, rules=Rules(lease_ttl_s=30)) as link,
        AsyncRolloutClient(layout.root) as trainer,
        SegmentWriter(layout, "run-1-late") as segments,
    ):
        await trainer.submit([{"task_id": "toy-0"}], group_size=2)
        late, grader = HandWorker(link, "run-1-late"), HandWorker(link, "eval-1-late")
        await late.through("init")
        kept, other = await late.lease("run")
        result = make_result(7, b"what the first attempt left")
        place = await segments.append(result)
        given = {"path": place.path, "offset": place.offset, "length": place.length, "crc32": place.crc32}
        assert await late.commit(other, segment=given) == "ok"
        assert await link.call("DELETE", "/v1/members/run-1-late", answer=dict[str, int]) == {"freed": 1}
        assert await late.commit(kept, segment=given) == "superseded"
        assert await grader.through("eval") == ["ok"]
        # Nobody needs the segment and its writer is gone: only what was superseded keeps it.
        (again,) = await HandWorker(link, "run-2-next").lease("run")
        assert again["attempt"] == 2
        await asyncio.sleep(1.0)
        assert read_record(layout.root, place) == result
        commits = [item for event in read_events(layout) if isinstance(event, Committed) for item in event.commits]
        assert [item.segment for item in commits if item.lease == int(kept["lease_id"])] == [place]
        assert await HandWorker(link, "run-2-next").commit(again) == "ok"
        assert await grader.through("eval") == ["ok"]
    assert not layout.resolve(place.path).exists(), "the run has ended and nothing of it is needed"


async def test_b06_a_late_result_is_refused_and_logged_and_the_worker_goes_on(
    layout: RunLayout, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    go_on = asyncio.Event()

    async def slow(lease: LeaseOut) -> None:
        await go_on.wait()

    async with routed(layout, rules=Rules(lease_ttl_s=0.8)) as link, AsyncRolloutClient(layout.root) as trainer:
        await trainer.submit([{"task_id": "toy-1"}])
        slow_hand = ToyHand("run", slow)
        async with (
            working(layout, "init"),
            working(layout, "eval"),
            working(layout, "run", slow_hand, member="run-1-late", slots=1, heartbeat_s=3600) as late,
        ):
            await eventually(lambda: slow_hand.leases, "the first attempt runs")
            other = HandWorker(link, "run-2-other")
            (again,) = await other.lease("run", wait_s=10)
            assert await other.commit(again) == "ok"
            rows, _ = await until_closed(trainer, 1)
            go_on.set()
            await eventually(lambda: "came too late" in caplog.text, "the worker logs the refusal")
            await trainer.submit([{"task_id": "toy-2"}])
            await until_closed(trainer, 2)
            assert not late.task.done()
        status = await trainer.status()
    assert status["rollouts"] == {"accepted": 2, "completed": 2, "failed": 0, "cancelled": 0, "open": 0}
    (first,) = rows
    assert sum(row["rollout_id"] == first for row in _lines(layout)) == 1


def _lines(layout: RunLayout) -> list[dict[str, object]]:
    lines = [line for path in sorted(layout.index.iterdir()) for line in path.read_text().splitlines()[1:]]
    return [line for line in map(json.loads, lines) if line["type"] == "rows"]


@pytest.mark.parametrize("max_lag", [2])
async def test_b13_no_row_of_a_group_over_its_bound_is_in_the_shards(layout: RunLayout, max_lag: int) -> None:
    """Agents of four turns; the trainer publishes by the work that is done, and the engine samples with it at once."""
    engine = versioned_engine()
    engine.version = 1
    publishing, turns = asyncio.Lock(), 0

    async def publish() -> None:
        async with publishing:
            engine.version += 1
            await trainer.policy(engine.version)

    async def dawdle(row: dict[str, object], turn: int, sandbox: object) -> None:
        nonlocal turns
        turns += 1
        if turns % 30 == 0:
            await publish()
        if turn == 3 and row["task_id"] in {"toy-2", "toy-3"}:  # their first turn is too old before they end
            for _ in range(max_lag + 1):
                await publish()

    tasks = [{"task_id": f"toy-{i}"} for i in range(18)]
    async with routed(layout, rules=Rules(max_lag=max_lag)), AsyncRolloutClient(layout.root) as trainer:
        await trainer.policy(1)
        await trainer.submit(tasks, group_size=3)
        async with (
            working(layout, "init"),
            run_pool(layout, TurnsAgent(4, dawdle), engine, slots=9),  # type: ignore[arg-type]
            eval_pool(layout),
        ):
            rows, closed = await until_closed(trainer, 18)
    by_group = {line["group_id"]: [rows[r]["status"] for r in line["rollout_ids"]] for line in closed}
    assert {tuple(sorted(set(statuses))) for statuses in by_group.values()} == {("completed",), ("failed",)}
    at_close = _versions_at_close(layout)
    with ShardReader(layout.root) as reader:
        seen = [row for row in reader if rows[row.rollout_id]["shard"] is not None]
    assert {row.rollout_id for row in seen} == {r for r, row in rows.items() if row["status"] == "completed"}
    for row in seen:
        (chain,) = row.chains
        oldest = min(span["version"] for span in chain["policy_versions"])
        assert oldest == rows[row.rollout_id]["min_policy_version"] == row["min_policy_version"]
        assert at_close[rows[row.rollout_id]["group_id"]] - oldest <= max_lag


def _versions_at_close(layout: RunLayout) -> dict[str, int]:
    ledger, versions, open_before = Ledger(), {}, set[str]()
    for event in read_events(layout):
        ledger.apply(event)
        now = set(ledger.state.groups)
        versions.update(dict.fromkeys(open_before - now, ledger.state.policy_version))
        open_before = now
    return versions


async def test_b32_the_deadline_ends_a_rollout_that_is_retried_again_and_again(layout: RunLayout) -> None:
    async def fails(lease: LeaseOut) -> Result:
        return Result(outcome="llm", message="no replica answers")

    loop = asyncio.get_running_loop()
    async with routed(layout, rules=Rules(max_attempts=1000)), AsyncRolloutClient(layout.root) as trainer:
        began = loop.time()
        await trainer.submit([{"task_id": "toy-1"}], group_size=2, deadline_s=2.5)
        async with working(layout, "init"), working(layout, "run", ToyHand("run", fails)):
            rows, closed = await until_closed(trainer, 1, timeout_s=15)
        took_s = loop.time() - began
    assert 2.4 <= took_s <= 12.0
    assert closed[0]["closed_by"] == "deadline" and {row["status"] for row in rows.values()} == {"cancelled"}
    assert len(leased(layout, "run")) >= 4


async def test_b40_a_straggler_is_stopped_at_the_deadline_and_its_group_keeps_its_shape(layout: RunLayout) -> None:
    stopped = asyncio.Event()

    async def straggles(lease: LeaseOut) -> None:
        if lease.rollout_id.endswith("-2"):
            try:
                await asyncio.sleep(3600)
            finally:
                stopped.set()

    async with (
        routed(layout), AsyncRolloutClient(layout.root) as trainer,
        working(layout, "init"), working(layout, "run", ToyHand("run", straggles)), working(layout, "eval"),
    ):  # fmt: skip
        (group,) = await trainer.submit([{"task_id": "toy-1"}], group_size=4, deadline_s=2.5)
        rows, (closed,) = await until_closed(trainer, 1)
        await asyncio.wait_for(stopped.wait(), 30)
    assert (closed["closed_by"], closed["usable"]) == ("deadline", 3)
    assert closed["rollout_ids"] == group["rollout_ids"] and sorted(rows) == sorted(group["rollout_ids"])
    assert rows[group["rollout_ids"][2]]["status"] == "cancelled"
