"""Snapshots: what they cover, when they are passed over, and that a ledger from one goes on like the original."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.errors import JournalError
from stages.journal import snapshots
from stages.journal.history import Replay
from stages.layout import RunLayout
from stages.ledger import grants, image
from stages.ledger.events import (
    Cancelled,
    CommitItem,
    Committed,
    EpochBegan,
    GroupSpec,
    Heartbeat,
    Leased,
    MemberGone,
    ReplicaChanged,
    Rules,
    SessionOpened,
    Submitted,
    Tick,
)
from stages.ledger.machine import Ledger
from stages.ledger.state import STAGES
from stages.router.core import Router
from stages.router.places import group_name
from stages.shards.index import read_index
from stages.trajectory import RowRange
from tests.support.routers import make_run
from tests.support.waiting import eventually

RULES = Rules(lease_ttl_s=10.0, max_attempts=2, ready_buffer=3, max_lag=2)
OUTCOMES = ("ok", "ok", "ok", "ok", "policy_timeout", "sandbox", "llm", "given_back")
WHERE = RowRange("handoff/x-0.seg", 0, 8, 1)


class Twin:
    """One random life of a ledger; what is chosen from its state is compared with a second ledger's choice."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.t = 1000.0
        self.ledgers = [Ledger()]
        self.groups = 0
        self.apply(EpochBegan(t=self.t, epoch=1, run_id="r", history=[], rules=RULES))
        for replica in ("r1", "r2"):
            self.apply(ReplicaChanged(t=self.t, replica=replica, change="join", url="http://x", capacity=2))

    def apply(self, event: Any) -> Any:
        results = [ledger.apply(event) for ledger in self.ledgers]
        assert all(result == results[0] for result in results)
        return results[0][0]

    def same(self, choose: Any) -> Any:
        choices = [choose(ledger) for ledger in self.ledgers]
        assert all(choice == choices[0] for choice in choices)
        return choices[0]

    def fork(self) -> None:
        self.ledgers = [self.ledgers[0], image.decode(image.encode(self.ledgers[0]))]

    def step(self) -> None:
        draw = self.random
        kind = draw.choice(["submit", "lease", "lease", "lease", "commit", "commit", "beat", "gone", "time", "cancel"])
        getattr(self, kind)()
        assert len({ledger.digest() for ledger in self.ledgers}) == 1

    def submit(self) -> None:
        self.groups += 1
        n = self.random.randint(1, 3)
        group = GroupSpec(f"g{self.groups}", f"t{self.groups}", "digest", self.random.choice("abc"))
        self.apply(Submitted(
            t=self.t, groups=[group], n=n, priority=self.random.randint(0, 3), key=f"k{self.groups}",
            deadline_s=self.random.choice([None, None, 30.0]), min_usable=self.random.choice([None, 1]),
        ))  # fmt: skip

    def lease(self) -> None:
        stage, member = self.random.choice(STAGES), self.random.choice(["m1", "m2", "m3"])
        free = self.random.randint(1, 4)
        work = self.same(lambda ledger: grants.choose(ledger, stage, free, {"sha256:a"}))
        if not work:
            return
        for lease in self.apply(Leased(t=self.t, member=member, stage=stage, work=work)):
            replica = self.same(lambda ledger: ledger.state.fleet.choose())
            if stage == "run" and replica is not None:
                self.apply(SessionOpened(t=self.t, rollout_id=lease.work, attempt=lease.attempt, replica=replica))

    def commit(self) -> None:
        leases = list(self.ledgers[0].state.leases.values())
        if not leases:
            return
        lease = self.random.choice(leases)
        outcome = self.random.choice(OUTCOMES)
        if lease.stage == "init" and outcome == "policy_timeout":
            outcome = "sandbox"
        given: dict[str, Any] = {
            "init": {"layer": f"sha256:{lease.work}"}, "run": {"segment": WHERE, "min_policy_version": 0},
            "eval": {"row": WHERE, "reward": 1.0, "chains": 1},
        }[lease.stage]  # fmt: skip
        item = CommitItem(lease=lease.id, outcome=outcome, **(given if outcome != "given_back" else {}))
        self.apply(Committed(t=self.t, member=lease.member, commits=[item]))

    def beat(self) -> None:
        held = list(self.ledgers[0].state.leases)
        self.apply(Heartbeat(t=self.t, member="m1", leases=held[:3]))

    def gone(self) -> None:
        self.apply(MemberGone(t=self.t, member=self.random.choice(["m1", "m2", "m3"])))

    def time(self) -> None:
        self.t += self.random.choice([0.3, 1.0, 11.0])
        self.apply(Tick(t=self.t, gap_s=self.random.choice([0.0, 0.0, 20.0])))

    def cancel(self) -> None:
        rollouts = list(self.ledgers[0].state.rollouts)
        self.apply(Cancelled(t=self.t, rollouts=rollouts[:1]))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), before=st.integers(0, 150))
def test_a_ledger_from_an_image_goes_on_exactly_like_the_original(seed: int, before: int) -> None:
    twin = Twin(seed)
    for _ in range(before):
        twin.step()
    twin.fork()
    for _ in range(150):
        twin.step()


# -- through a router's life ------------------------------------------------------------------------------------------


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "run")


@contextlib.asynccontextmanager
async def opened(layout: RunLayout, snapshot_events: int = 1 << 30) -> AsyncIterator[Router]:
    async with Router.opened(layout, "r", RULES, "node", snapshot_events=snapshot_events) as router:
        yield router


async def work(router: Router, groups: int) -> None:
    """Groups of two through to their ends: one rollout completes, the other is cancelled."""
    for _ in range(groups):
        number = router.ledger.state.next_group
        spec = GroupSpec(group_name(number), f"t{number}", router.payloads.stage({"task_id": f"t{number}"}), "env")
        await router.submit(Submitted(t=router.clock(), groups=[spec], n=2, key=f"k{number}", body_digest="d"))
        await router.submit(Cancelled(t=router.clock(), rollouts=[f"{spec.group_id}-1"]))
        for stage in STAGES:
            chosen = grants.choose(router.ledger, stage, 10)
            if not chosen:
                continue
            for lease in await router.submit(Leased(t=router.clock(), member="m", stage=stage, work=chosen)):
                given: dict[str, Any] = {"init": {"layer": "sha256:e"}, "run": {"segment": WHERE}}.get(
                    stage, {"row": WHERE, "reward": 1.0, "chains": 1}
                )
                item = CommitItem(lease=lease.id, outcome="ok", **given)
                await router.submit(Committed(t=router.clock(), member="m", commits=[item]))


def replayed_from_zero(layout: RunLayout) -> Ledger:
    ledger = Ledger()
    for event in Replay(layout).events():
        ledger.apply(event)
    return ledger


async def reopened(layout: RunLayout) -> int:
    """Reopen, check everything against a replay of the whole journal, and return how many events had to be read."""
    whole = replayed_from_zero(layout)
    async with opened(layout) as router:
        replayed = router.replayed
        state = router.ledger.state
        assert (state.seq, state.counts) == (whole.state.seq, whole.state.counts)
        assert (state.rollouts, state.keys, state.segments) == (
            whole.state.rollouts, whole.state.keys, whole.state.segments
        )  # fmt: skip
        await eventually(lambda: router.publisher.complete == state.seq, "everything is published")
    failures = layout.failures.read_bytes().splitlines()
    assert len(failures) == whole.state.counts.cancelled + whole.state.counts.failed
    assert [line.seq for line in read_index(layout.root)] == list(range(1, whole.state.seq + 1))
    return replayed


def snapshot_files(layout: RunLayout) -> list[Path]:
    return sorted(layout.journal.glob("*.snapshot"))


async def test_a_clean_end_leaves_a_snapshot_that_stands_for_everything(layout: RunLayout) -> None:
    async with opened(layout) as router:
        await work(router, 5)
    assert len(snapshot_files(layout)) == 1
    assert await reopened(layout) == 0


async def test_snapshots_in_mid_life_leave_the_rest_to_replay_and_two_are_kept(layout: RunLayout) -> None:
    async with opened(layout, snapshot_events=20) as router:
        for _ in range(6):
            before = snapshot_files(layout)
            await work(router, 4)
            await eventually(lambda before=before: snapshot_files(layout) != before, "a snapshot is written")
    files = snapshot_files(layout)
    assert len(files) == 2
    files[-1].unlink()  # the one of the clean end: as after a kill
    assert 0 < await reopened(layout) < 40


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "missing", "schema"])
async def test_a_damaged_snapshot_is_passed_over_for_the_older_one_or_for_all_of_the_journal(
    layout: RunLayout, damage: str
) -> None:
    for _ in range(2):
        async with opened(layout) as router:
            await work(router, 3)
    _, newest = snapshot_files(layout)
    hurt(newest, damage)
    first = await reopened(layout)
    assert first > 0
    for path in snapshot_files(layout):
        hurt(path, damage)
    assert await reopened(layout) > first


def hurt(path: Path, damage: str) -> None:
    data = path.read_bytes()
    path.unlink()
    if damage == "flipped":
        path.write_bytes(data[:-10] + bytes([(data[-10] + 1) % 256]) + data[-9:])
    elif damage == "short":
        path.write_bytes(data[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "schema":
        path.write_bytes(data.replace(image.SCHEMA.encode(), b"0" * 16))


async def test_a_snapshot_that_stands_for_more_than_history_holds_is_not_used(layout: RunLayout) -> None:
    """A zombie's, in effect: the sealing epoch has read less than the snapshot claims."""
    async with opened(layout) as router:
        await work(router, 3)
        for _ in range(4):
            await router.submit(Tick(t=router.clock()))
    part = layout.journal_part(1, 0)
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:-4]))
    assert await reopened(layout) == len(lines) - 4


async def test_a_journal_that_ends_before_what_the_index_shows_is_an_error(layout: RunLayout) -> None:
    async with opened(layout) as router:
        await work(router, 3)
    part = layout.journal_part(1, 0)
    part.write_bytes(b"".join(part.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(JournalError, match="shows seq 9"):
        async with opened(layout):
            pass


async def test_a_snapshot_of_another_history_of_the_same_length_is_not_used(layout: RunLayout) -> None:
    async with opened(layout) as router:
        await work(router, 3)
    (snapshot,) = snapshots.newest_first(layout)
    parts = list(snapshot.header.parts)
    assert Replay(layout).covers(parts, snapshot.header.last_line)
    last = parts[-1]
    changed = [*parts[:-1], type(last)(last.epoch, last.part, last.length, "00000000")]
    assert not Replay(layout).covers(changed, snapshot.header.last_line)
    longer = [*parts[:-1], type(last)(last.epoch, last.part, last.length + 1, last.crc)]
    assert not Replay(layout).covers(longer, snapshot.header.last_line)
    assert not Replay(layout).covers([*parts, type(last)(9, 0, 10, "00000000")], 10)
    assert not Replay(layout).covers([], 0)


@pytest.mark.parametrize("lost", ["index", "failures"])
async def test_what_index_or_failures_have_lost_is_told_again_by_the_whole_journal(
    layout: RunLayout, lost: str
) -> None:
    async with opened(layout) as router:
        await work(router, 3)
    if lost == "index":
        path = layout.index_part(1, 0)
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    else:
        layout.failures.unlink()
    assert await reopened(layout) > 0


async def test_a_covered_part_that_lost_bytes_is_an_error_and_never_a_shorter_history(layout: RunLayout) -> None:
    async with opened(layout) as router:
        await work(router, 3)
    async with opened(layout) as router:
        await work(router, 1)
    path = layout.journal_part(1, 0)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(JournalError, match="sealed at"):
        async with opened(layout):
            pass
