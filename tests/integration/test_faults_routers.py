"""Two routers against one run directory: never both acknowledge, never is one seq published twice."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx

from stages import beacon
from stages.journal.history import read_events
from stages.layout import RunLayout
from stages.ledger.events import Committed, Rules
from tests.support import runs
from tests.support.crashes import REFUSED
from tests.support.routers import HandWorker, make_run
from tests.support.stories import RouterProcess, story
from tests.support.waiting import eventually

RULES = Rules(lease_ttl_s=1.0)
ROUNDS = 4


def seqs_of(layout: RunLayout) -> list[list[int]]:
    """The seqs in each index file."""
    return [
        [int(line.partition(b'"seq":')[2].partition(b",")[0]) for line in path.read_bytes().splitlines()[1:]]
        for path in sorted(layout.index.iterdir())
    ]


async def test_two_routers_that_start_at_once_do_not_both_serve(tmp_path: Path) -> None:
    for number in range(ROUNDS):
        layout = make_run(tmp_path / f"run-{number}")
        routers = [RouterProcess(layout, rules=RULES) for _ in range(3)]
        try:
            async with asyncio.timeout(120), story(layout) as one:
                await one.tell()
            await eventually(lambda given=routers: sum(router.ended for router in given) == 2, "one router is left")
            assert sorted(router.process.exitcode or 0 for router in routers) == [0, REFUSED, REFUSED]
        finally:
            for router in routers:
                await router.stop()
        one.check()
        published = [seq for seqs in seqs_of(layout) for seq in seqs]
        assert len(published) == len(set(published)), "a seq was published twice"


async def test_a_second_router_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    first = RouterProcess(layout, rules=RULES)
    try:
        async with story(layout) as one:
            second = RouterProcess(layout, rules=RULES)
            await asyncio.gather(one.tell(), eventually(lambda: second.ended, "the second router gives up"))
            assert second.process.exitcode == REFUSED and not first.ended
    finally:
        await first.stop()
    one.check()
    assert runs.replayed(layout.root).state.epoch == 1


async def test_a_router_that_stood_still_past_its_lease_acknowledges_nothing_when_it_wakes(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    old = RouterProcess(layout, rules=RULES)
    async with story(layout) as one:
        before = beacon.read(layout)
        assert before is not None
        groups = await one.trainer.submit([{"task_id": "toy-0"}], group_size=4, idempotency_key="story")
        worker = HandWorker(one.link, "w-1-a")
        assert await worker.through("init") == ["ok"]
        held = await worker.lease("run", free=2)
        old.send(signal.SIGSTOP)
        token = layout.worker_token.read_text().strip()
        body = {"member": "w-1-a", "epoch": 1, "commits": [
            {key: held[0][key] for key in ("lease_id", "rollout_id", "attempt")}
            | {"outcome": "ok", "segment": {"path": "handoff/zombie-0.seg", "offset": 0, "length": 8, "crc32": 1}}
        ]}  # fmt: skip
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=30) as direct:
            # Lies in the old router's socket while it sleeps: it is the first thing that it does when it wakes.
            late = asyncio.create_task(direct.post(f"{before.url}/v1/commit", json=body))
            new = RouterProcess(layout, rules=RULES)
            try:
                await eventually(lambda: (beacon.read(layout) or before).epoch == 2, "the second router takes over")
                async with story(layout) as two:
                    await two.tell(tasks=1, group_size=4)
                old.send(signal.SIGCONT)
                answers = await asyncio.gather(late, return_exceptions=True)
                await eventually(lambda: old.ended, "the old router ends by itself")
            finally:
                await old.stop()
                await new.stop()
    assert old.process.exitcode == REFUSED and new.process.exitcode == 0
    assert [getattr(answer, "status_code", 0) for answer in answers] != [200], "a fenced router acknowledged"
    assert two.accepted == groups[0]["rollout_ids"]
    two.check()
    segments = {
        item.segment.path for event in read_events(layout) if isinstance(event, Committed)
        for item in event.commits if item.segment is not None
    }  # fmt: skip
    assert "handoff/zombie-0.seg" not in segments
    published = [seq for seqs in seqs_of(layout) for seq in seqs]
    assert len(published) == len(set(published)), "a seq was published twice"
    found = beacon.read(layout)
    assert found is not None and found.epoch == 2 and found.ended, "the old router's beat covers the new one's"
