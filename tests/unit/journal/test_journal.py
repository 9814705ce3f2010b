"""The journal: what is acknowledged survives, what is torn does not exist, and one epoch ends where the next begins."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from stages import sharedfs
from stages.errors import FencedError, JournalError
from stages.journal.codec import encode_line, scan
from stages.journal.history import Replay, claim, highest_claim, is_fenced, read_events
from stages.journal.payloads import Payloads
from stages.journal.writer import JournalWriter
from stages.layout import RunLayout
from stages.ledger.events import EpochBegan, Rules, Tick
from tests.support.faults import FaultyFs


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    for directory in layout.directories:
        sharedfs.make_dirs(directory)
    return layout


class Epoch:
    """A claimed epoch with a running writer, as the router has it."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        self.number = highest_claim(layout) + 1
        claim(layout, self.number, "test")
        self.payloads = Payloads(layout)
        self.payloads.load()
        self.payloads.begin(self.number)
        replay = Replay(layout)
        self.replayed = list(replay.events())
        self.history = replay.history
        self.writer = JournalWriter(layout, self.number, self.payloads, lambda effects: None)

    async def __aenter__(self) -> Epoch:
        self.task = asyncio.create_task(self.writer.run())
        began = EpochBegan(t=0.0, epoch=self.number, run_id="r", history=self.history, rules=Rules())
        await self.writer.put(began, None, [])
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        await asyncio.gather(self.task, return_exceptions=True)

    async def tick(self, t: float) -> float:
        return await self.writer.put(Tick(t=t), t, [])


def ticks(layout: RunLayout) -> list[float]:
    return [event.t for event in read_events(layout) if isinstance(event, Tick)]


async def test_acknowledged_events_are_read_back_in_order_over_epochs(layout: RunLayout) -> None:
    async with Epoch(layout) as first:
        await asyncio.gather(*(first.tick(float(i)) for i in range(50)))
    async with Epoch(layout) as second:
        assert len(second.replayed) == 51
        await second.tick(99.0)
    assert ticks(layout) == [*map(float, range(50)), 99.0]


async def test_events_that_wait_together_share_one_fsync(layout: RunLayout) -> None:
    fs = FaultyFs()
    async with Epoch(layout) as epoch:
        with sharedfs.use(fs):
            await asyncio.gather(*(epoch.tick(float(i)) for i in range(500)))
    assert fs.counts["fsync"] <= 3


@pytest.mark.parametrize("torn", [b"", b"0", b"00000000 {", b"deadbeef {}\n", b"\0" * 40])
async def test_a_torn_tail_is_not_believed_and_ends_the_part(layout: RunLayout, torn: bytes) -> None:
    async with Epoch(layout) as epoch:
        await epoch.tick(1.0)
    with layout.journal_part(1, 0).open("ab") as file:
        file.write(torn + encode_line(b'{"type":"tick","t":2.0}'))
    assert ticks(layout) == ([1.0, 2.0] if not torn else [1.0])


async def test_what_a_zombie_appends_after_it_was_sealed_does_not_exist(layout: RunLayout) -> None:
    async with Epoch(layout) as old:
        await old.tick(1.0)
        async with Epoch(layout) as new:
            await new.tick(2.0)
            with pytest.raises(FencedError):
                await old.tick(666.0)
    assert ticks(layout) == [1.0, 2.0]


async def test_a_sealed_part_that_lost_bytes_is_an_error_and_never_a_shorter_history(layout: RunLayout) -> None:
    async with Epoch(layout) as old:
        await old.tick(1.0)
    async with Epoch(layout):
        pass
    path = layout.journal_part(1, 0)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(JournalError, match="sealed at"):
        ticks(layout)


async def test_an_epoch_that_was_claimed_and_never_began_changes_nothing(layout: RunLayout) -> None:
    async with Epoch(layout) as first:
        await first.tick(1.0)
    claim(layout, 2, "died at once")
    sharedfs.AppendFile(layout.journal_part(2, 0)).close()
    async with Epoch(layout) as third:
        assert third.number == 3
        await third.tick(3.0)
    assert ticks(layout) == [1.0, 3.0]


def test_an_epoch_is_claimed_once(layout: RunLayout) -> None:
    claim(layout, 1, "a")
    with pytest.raises(FencedError):
        claim(layout, 1, "b")
    assert not is_fenced(layout, 1)
    claim(layout, 2, "c")
    assert is_fenced(layout, 1)
    assert not [name for name in sharedfs.list_dir(layout.journal) if name.endswith(".tmp")]


@pytest.mark.parametrize("fault", ["write", "short write", "fsync"])
async def test_a_full_disk_stops_acknowledgements_and_loses_and_doubles_nothing(layout: RunLayout, fault: str) -> None:
    async with Epoch(layout) as epoch:
        await epoch.tick(1.0)
        fs = FaultyFs()
        if fault == "short write":
            fs.shorten(times=3)
        else:
            fs.fail(fault, errno.ENOSPC, times=3)
        with sharedfs.use(fs):
            waiting = asyncio.gather(*(epoch.tick(float(t)) for t in (2, 3)))
            while not epoch.writer.stalled_s:
                await asyncio.sleep(0.01)
            assert not waiting.done()
            with pytest.raises(JournalError, match="stalled"):
                epoch.writer.check_open()
            await asyncio.wait_for(waiting, 20)
        await epoch.tick(4.0)
    assert ticks(layout) == [1.0, 2.0, 3.0, 4.0]


async def test_a_bad_disk_after_a_restart_of_parts_is_replayed_by_good_lengths(layout: RunLayout) -> None:
    async with Epoch(layout) as epoch:
        await epoch.tick(1.0)
        fs = FaultyFs()
        fs.fail("fsync", errno.EIO)
        with sharedfs.use(fs):
            await epoch.tick(2.0)
    parts = [name for name in sharedfs.list_dir(layout.journal) if name.startswith("000001-")]
    assert len(parts) == 2
    assert ticks(layout) == [1.0, 2.0]


async def test_payloads_are_stored_once_by_digest_and_found_after_a_restart(layout: RunLayout) -> None:
    row = {"task_id": "a", "question": "1 + 1 = ?", "text": "ä\n" * 100}
    async with Epoch(layout) as epoch:
        first, second = epoch.payloads.stage(row), epoch.payloads.stage(dict(reversed(row.items())))
        assert first == second
        await epoch.tick(1.0)
        assert epoch.payloads.stage(row) == first
        await epoch.tick(2.0)
    async with Epoch(layout) as again:
        assert again.payloads.read(first) == row
        with pytest.raises(JournalError, match="in no pack"):
            again.payloads.read("0" * 32)
    assert layout.payloads_part(1, 0).read_bytes().count(b"question") == 1


async def test_rows_longer_than_a_block_are_found_after_a_restart_and_a_torn_one_is_not(layout: RunLayout) -> None:
    rows = [{"task_id": f"t{i}", "text": "x" * size} for i, size in enumerate([10, 3 << 20, 1 << 20, 0, 700_000, 5])]
    async with Epoch(layout) as epoch:
        digests = [epoch.payloads.stage(row) for row in rows]
        await epoch.tick(1.0)
    path = layout.payloads_part(1, 0)
    path.write_bytes(path.read_bytes()[:-3])
    fresh = Payloads(layout)
    fresh.load()
    assert [fresh.read(digest) for digest in digests[:-1]] == rows[:-1]
    with pytest.raises(JournalError, match="in no pack"):
        fresh.read(digests[-1])


async def test_a_damaged_payload_is_named(layout: RunLayout) -> None:
    async with Epoch(layout) as epoch:
        digest = epoch.payloads.stage({"task_id": "a", "answer": 15})
        await epoch.tick(1.0)
    path = layout.payloads_part(1, 0)
    path.write_bytes(path.read_bytes().replace(b"15", b"16"))
    fresh = Payloads(layout)
    fresh.load()
    with pytest.raises(JournalError, match="damaged"):
        fresh.read(digest)


def test_scan_stops_at_the_first_bad_line() -> None:
    good = encode_line(b'{"a":1}')
    assert [bytes(line.body) for line in scan(good + good.replace(b"1", b"2") + good)] == [b'{"a":1}']
