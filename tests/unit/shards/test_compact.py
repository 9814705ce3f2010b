"""Compaction: the same rows under the same seqs, one Parquet for many shards, and safe wherever it is killed."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stages import beacon, sharedfs
from stages.beacon import Beacon
from stages.errors import SchemaError, ShardError
from stages.identity import here, is_surely_dead
from stages.layout import RunLayout
from stages.shards import ShardReader, row_to_json
from stages.shards.compact import Compacted, compact
from stages.shards.sealed import read_record, record_path
from stages.trajectory import Message, Trajectory
from tests.support.faults import FaultyFs
from tests.unit.stages_files.samples import (
    group_line,
    make_chain,
    make_layout,
    make_row,
    publish,
    rows_line,
    write_rows,
)

COUNT = 40


def fill(layout: RunLayout, numbers: range, epoch: int, after: int, member: str) -> None:
    """Rollouts with 0 to 2 chains, one NaN reward among them, and a group line behind them."""
    written = [make_row(n, [make_chain(200 + n)] * (n % 3), tag="" if n % 2 else "a") for n in numbers]
    if 7 in numbers:
        written[numbers.index(7)] = msgspec.structs.replace(written[numbers.index(7)], reward=float("nan"))
    places = write_rows(layout, written, member)
    lines: list[Any] = [rows_line(after + n, *one) for n, one in enumerate(zip(written, places, strict=True), 1)]
    lines.append(group_line(len(lines) + after + 1, "g0", [row.rollout_id for row in written]))
    publish(layout, lines, epoch, after)


def everything(layout: RunLayout) -> list[str]:
    with ShardReader(layout.root, visibility_s=0) as reader:
        return [f"{row.seq} {row_to_json(row)!r}" for row in reader]


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = make_layout(tmp_path)
    fill(layout, range(COUNT), 1, 0, "eval-1")
    return layout


def test_rows_seqs_and_groups_are_the_same_and_the_shards_are_gone(layout: RunLayout) -> None:
    before = everything(layout)
    size = layout.shard("eval-1", 0).stat().st_size
    done = compact(layout.root, group_bytes=16_000, file_bytes=60_000)
    assert (done.rollouts, done.shards, done.shard_bytes) == (COUNT, 1, size)
    assert done.files > 1 and max(len(file.first_seqs) for file in read_record(layout).files) > 1
    assert sorted(path.suffix for path in layout.shards.iterdir()) == [".json"] + [".parquet"] * done.files
    assert everything(layout) == before
    with ShardReader(layout.root, after=30, visibility_s=0) as reader:
        assert [row.seq for row in reader] == list(range(31, COUNT + 1))
        found = reader.get("r14")
        assert found is not None and len(found.chains) == 2
        assert found.chains[1].array("token_ids").to_pylist() == make_chain(214).token_ids
    with ShardReader(layout.root, visibility_s=0) as reader:
        (group,) = reader.groups()
        assert [row.rollout_id for row in group.rows] == [f"r{n}" for n in range(COUNT)]
    assert compact(layout.root) == Compacted(0, 0, 0, 0, 0)


def test_a_resumed_run_has_both_kinds_and_can_be_compacted_again(layout: RunLayout) -> None:
    compact(layout.root)
    fill(layout, range(COUNT, 2 * COUNT), 2, COUNT + 1, "eval-2")
    before = everything(layout)
    assert len(before) == 2 * COUNT
    assert compact(layout.root).rollouts == COUNT
    assert everything(layout) == before
    assert [file.first_seqs[0] for file in read_record(layout).files] == [1, COUNT + 2]


BREAKS = [("fsync", "parquet"), ("rename", "parquet"), ("rename", "compacted.json"), ("unlink", "arrows")]


@pytest.mark.parametrize(("op", "name"), BREAKS)
def test_wherever_it_breaks_all_rows_stay_and_the_next_call_ends_it(layout: RunLayout, op: str, name: str) -> None:
    before, fs = everything(layout), FaultyFs()
    fs.fail(op, errno.EIO, name)
    with sharedfs.use(fs), pytest.raises(OSError, match=r"Input/output|arrows|compacted"):
        compact(layout.root)
    assert everything(layout) == before
    if op != "unlink":
        assert layout.shard("eval-1", 0).exists()
    assert compact(layout.root).shards == 1
    assert everything(layout) == before
    assert not list(layout.shards.glob("*.arrows")) and not list(layout.shards.glob(".*"))


def test_a_reader_that_began_before_goes_on(layout: RunLayout) -> None:
    before = everything(layout)
    with ShardReader(layout.root, visibility_s=0) as early, ShardReader(layout.root, visibility_s=0) as late:
        rows = iter(late)
        seen = [next(rows)]
        compact(layout.root)
        assert [f"{row.seq} {row_to_json(row)!r}" for row in early] == before  # it had opened nothing yet
        assert [f"{row.seq} {row_to_json(row)!r}" for row in [*seen, *rows]] == before  # it had the shard mapped


def test_a_damaged_page_is_an_error_and_never_a_row(layout: RunLayout) -> None:
    compact(layout.root)
    (path,) = layout.shards.glob("*.parquet")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardError, match="row group 0 cannot be read"):
        everything(layout)


def test_what_reads_back_otherwise_is_not_published(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.shards.compact._same", lambda left, right: False)
    with pytest.raises(ShardError, match="reads back otherwise than it was written: the shards stay"):
        compact(layout.root)
    assert not record_path(layout).exists() and layout.shard("eval-1", 0).exists()


def test_what_a_dead_router_committed_and_did_not_publish_is_never_lost(layout: RunLayout) -> None:
    """Its shard holds one rollout that the index names and one that only the next router's epoch will name."""
    rows = [make_row(n, [make_chain(200 + n)]) for n in (COUNT, COUNT + 1)]
    places = write_rows(layout, rows, "eval-2")
    named, unnamed = [rows_line(COUNT + 2 + n, *one) for n, one in enumerate(zip(rows, places, strict=True))]
    publish(layout, [named], 2, COUNT + 1)
    mine = here()
    dead = Beacon(2, "http://127.0.0.1:1", mine.node, 2**22 + 1, boot=mine.boot, pid_namespace=mine.pid_namespace)
    assert is_surely_dead(dead.identity)
    beacon.write(layout, dead)
    for force in (False, True):
        with pytest.raises(ShardError, match="if the router died, resume it first"):
            compact(layout.root, force=force)
    publish(layout, [unnamed], 3, COUNT + 2)
    assert len(everything(layout)) == COUNT + 2


def test_a_sealed_file_answers_for_nothing_that_the_index_got_later(layout: RunLayout) -> None:
    """A shard that was replaced and is still there, since its removal failed, and a later line that names it."""
    rows = [make_row(n, [make_chain(200 + n)]) for n in (COUNT, COUNT + 1)]
    places = write_rows(layout, rows, "eval-2")
    first, late = [rows_line(COUNT + 2 + n, *one) for n, one in enumerate(zip(rows, places, strict=True))]
    publish(layout, [first], 2, COUNT + 1)
    fs = FaultyFs()
    fs.fail("unlink", errno.EIO, "arrows")
    with sharedfs.use(fs), pytest.raises(OSError, match="Input/output"):
        compact(layout.root)
    publish(layout, [late], 3, COUNT + 2)
    before = everything(layout)
    assert len(before) == COUNT + 2
    assert compact(layout.root).rollouts == 1 and read_record(layout).last_seq == COUNT + 3
    assert everything(layout) == before and not list(layout.shards.glob("*.arrows"))


def test_messages_count_in_a_row_groups_size(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    said = Trajectory([make_chain(6)], [Message("user", "x" * 20_000)])
    rows = [msgspec.structs.replace(make_row(n, [make_chain(6)]), trajectory=said) for n in range(8)]
    places = write_rows(layout, rows)
    publish(layout, [rows_line(n, *one) for n, one in enumerate(zip(rows, places, strict=True), 1)])
    compact(layout.root, group_bytes=40_000)
    assert len(read_record(layout).files[0].first_seqs) == 4


def test_a_run_that_may_still_write_is_left_alone(layout: RunLayout) -> None:
    alive = Beacon(1, "http://127.0.0.1:1", "elsewhere", 1)
    beacon.write(layout, alive)
    for force in (False, True):
        with pytest.raises(ShardError, match=r"its router \(elsewhere, pid 1\) has not ended"):
            compact(layout.root, force=force)
    beacon.write(layout, msgspec.structs.replace(alive, ended=True))
    layout.member("eval-9-ab").write_text("{}")
    with pytest.raises(ShardError, match="worker eval-9-ab may still write"):
        compact(layout.root)
    assert compact(layout.root, force=True).rollouts == COUNT


def test_a_newer_record_is_refused(layout: RunLayout) -> None:
    record_path(layout).write_text('{"v": 2}')
    with pytest.raises(SchemaError, match="version 2, known is 1"):
        everything(layout)
