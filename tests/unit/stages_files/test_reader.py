"""ShardReader: order, groups, resuming, damage, newer schemas, and pyarrow alone."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stages
from stages import sharedfs
from stages.errors import ShardError
from stages.layout import RunLayout
from stages.shards import ShardReader, ShardRow, row_to_json
from stages.shards.index import IndexLine
from stages.shards.reader import read_row_json
from stages.shards.schema import SCHEMA
from stages.trajectory import Row
from tests.support.faults import FaultyFs
from tests.unit.stages_files.samples import (
    group_line,
    make_chain,
    make_layout,
    make_row,
    publish,
    rows,
    rows_line,
    write_rows,
)


def fill(layout: RunLayout, groups: int = 4, size: int = 3) -> list[Row]:
    """Groups of alternating tags "a" and "b"; rollout n has n % 3 chains; one group line after each group."""
    written = [
        make_row(n, [make_chain(8 + n)] * (n % 3), group=f"g{n // size}", tag="ab"[n // size % 2])
        for n in range(groups * size)
    ]
    lines: list[IndexLine] = []
    for number, (row, place) in enumerate(zip(written, write_rows(layout, written), strict=True), 1):
        lines.append(rows_line(len(lines) + 1, row, place))
        if number % size == 0:
            members = [other.rollout_id for other in written[number - size : number]]
            lines.append(group_line(len(lines) + 1, row.group_id, members, row.tag))
    publish(layout, lines)
    return written


def eventually(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, "not in time"
        pause.wait(0.005)


def test_rows_come_in_order_with_all_their_chains(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    written = fill(layout)
    with ShardReader(layout.root) as reader:
        found = list(reader)
        assert reader.seq == 16
    assert [row.rollout_id for row in found] == [row.rollout_id for row in written]
    assert [row.seq for row in found] == [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15]
    for row, original in zip(found, written, strict=True):
        assert [chain["chain"] for chain in row.chains] == list(range(max(1, len(original.trajectory.chains))))
        for chain, wanted in zip(row.chains, original.trajectory.chains, strict=False):
            assert chain["token_ids"] == wanted.token_ids
            assert chain.array("logprobs").to_pylist() == wanted.logprobs
        assert row["reward_parts"] == original.reward_parts
        assert row["created_at"].timestamp() == original.created_at
        assert list(row.to_pydict()) == SCHEMA.names
        with pytest.raises(KeyError):
            row["no_such_column"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(rows(), min_size=1, max_size=4, unique_by=lambda row: row.rollout_id))
def test_what_any_writer_wrote_any_reader_reads(tmp_path_factory: pytest.TempPathFactory, drawn: list[Row]) -> None:
    layout = make_layout(tmp_path_factory.mktemp("drawn"))
    places = write_rows(layout, drawn)
    publish(layout, [rows_line(n, row, place) for n, (row, place) in enumerate(zip(drawn, places, strict=True), 1)])
    with ShardReader(layout.root) as reader:
        for found, row in zip(reader, drawn, strict=True):
            streams = [chain.token_ids for chain in row.trajectory.chains] or [[]]
            assert [chain["token_ids"] for chain in found.chains] == streams
            assert (found["reward"], found["tag"], found["nodes"]) == (row.reward, row.tag, row.nodes)
            assert json.loads(json.dumps(row_to_json(found)))["rollout_id"] == row.rollout_id


def test_resuming_by_seq_and_reading_a_tag(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    fill(layout)
    assert [row.seq for row in ShardReader(layout.root, after=6)] == [7, 9, 10, 11, 13, 14, 15]
    assert [row.seq for row in ShardReader(layout.root, tag="b")] == [5, 6, 7, 13, 14, 15]
    reader = ShardReader(layout.root, tag="b")
    assert next(iter(reader)).seq == 5
    assert reader.seq == 5
    assert next(iter(reader)).seq == 6


def test_groups_and_resuming_them(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    fill(layout)
    found = list(ShardReader(layout.root).groups())
    assert [(group.line.seq, group.line.group_id, len(group.rows)) for group in found] == [
        (4, "g0", 3), (8, "g1", 3), (12, "g2", 3), (16, "g3", 3),
    ]  # fmt: skip
    assert [row.rollout_id for row in found[1].rows] == ["r3", "r4", "r5"]
    # Resumed between a group's rows and its line, the group is still whole.
    resumed = list(ShardReader(layout.root, after=11).groups())
    assert [(group.line.group_id, len(group.rows)) for group in resumed] == [("g2", 3), ("g3", 3)]
    assert [group.line.group_id for group in ShardReader(layout.root, tag="b").groups()] == ["g1", "g3"]


def test_one_rollout_by_id(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    fill(layout)
    with ShardReader(layout.root) as reader:
        found = reader.get("r7")
        assert found is not None
        assert (found["rollout_id"], found.seq) == ("r7", 10)
        assert reader.get("r99") is None
        row = make_row(99)
        publish(layout, [rows_line(17, row, write_rows(layout, [row], "eval-2")[0])], epoch=2, after=16)
        late = reader.get("r99")
        assert late is not None
        assert late.seq == 17


def test_a_rollout_that_never_reached_a_shard(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    row = msgspec.structs.replace(make_row(0), status="cancelled", reward=None, mask_sample=True)
    publish(layout, [rows_line(1, row, None)])
    (found,) = ShardReader(layout.root)
    assert (found["status"], found["mask_sample"], found["reward"], found.chains) == ("cancelled", True, None, ())
    with pytest.raises(KeyError):
        found["token_ids"]
    with pytest.raises(ShardError, match="names no row"):
        read_row_json(layout.root, json.loads(layout.index_part(1, 0).read_bytes().splitlines()[1]))


def test_ranges_that_no_line_names_do_not_exist(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    places = [write_rows(layout, [make_row(n)], f"eval-{n}")[0] for n in range(3)]
    publish(layout, [rows_line(1, make_row(1), places[1])])
    assert [row.rollout_id for row in ShardReader(layout.root)] == ["r1"]


def test_json_of_one_and_of_several_chains(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    fill(layout)
    with ShardReader(layout.root) as reader:
        one, two = reader.get("r1"), reader.get("r2")
    assert one is not None
    assert two is not None
    assert list(row_to_json(one)) == SCHEMA.names
    assert row_to_json(one)["created_at"] == "2023-11-14T22:13:20.250000+00:00"
    several = row_to_json(two)
    assert [chain["chain"] for chain in several["chains"]] == [0, 1]
    assert several["chains"][0]["token_ids"] == several["token_ids"]
    line = json.loads(layout.index_part(1, 0).read_bytes().splitlines()[2])
    assert read_row_json(layout.root, line) == row_to_json(one)


def test_rows_outlive_their_reader(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    fill(layout)
    with ShardReader(layout.root) as reader:
        found = list(reader)
    assert found[1]["token_ids"] == list(range(100, 109))


def test_the_crc_is_checked_once_a_batch_and_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_layout(tmp_path)
    fill(layout)
    calls: list[int] = []
    real = zlib.crc32

    def counted(data: bytes) -> int:
        calls.append(len(data))
        return real(data)

    monkeypatch.setattr(zlib, "crc32", counted)
    reader = ShardReader(layout.root)
    assert len(list(reader)) == 12
    reader._batches._batches.clear()
    assert reader.get("r0") is not None
    assert len(calls) == 1


@pytest.mark.parametrize("damage", ["missing", "short", "empty", "changed"])
def test_an_invisible_range_is_waited_for_and_then_named(tmp_path: Path, damage: str) -> None:
    layout = make_layout(tmp_path)
    fill(layout)
    path = layout.shard("eval-1-3f9a", 0)
    whole = path.read_bytes()
    changed = whole[:-100] + bytes(100)
    path.unlink()
    if damage != "missing":
        path.write_bytes({"short": whole[:-8], "empty": b"", "changed": changed}[damage])
    with pytest.raises(ShardError, match=r"eval-1-3f9a-0\.arrows: bytes .*waited 0\.05 s"):
        list(ShardReader(layout.root, visibility_s=0.05))
    rest: list[ShardRow] = []
    late = ShardReader(layout.root, visibility_s=20)
    thread = threading.Thread(target=lambda: rest.extend(late))
    thread.start()
    thread.join(0.05)
    assert rest == []
    path.unlink(missing_ok=True)
    path.write_bytes(whole)
    thread.join(20)
    assert len(rest) == 12


def test_following_gives_what_comes_until_it_is_stopped(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    reader, found = ShardReader(layout.root, follow=True), list[str]()
    thread = threading.Thread(target=lambda: found.extend(row.rollout_id for row in reader))
    thread.start()
    try:
        for epoch in (1, 2):
            row = make_row(epoch)
            place = write_rows(layout, [row], f"eval-{epoch}")[0]
            publish(layout, [rows_line(epoch, row, place)], epoch, epoch - 1)
            eventually(lambda epoch=epoch: reader.seq == epoch)  # type: ignore[misc]
    finally:
        reader.stop()
        thread.join(20)
    assert not thread.is_alive()
    assert found == ["r1", "r2"]


def test_a_quiet_follower_is_gentle(tmp_path: Path) -> None:
    layout, fs = make_layout(tmp_path), FaultyFs()
    publish(layout, [])
    reader = ShardReader(layout.root, follow=True)
    with sharedfs.use(fs):
        thread = threading.Thread(target=lambda: list(reader))
        thread.start()
        thread.join(1.0)
        reader.stop()
        thread.join(20)
    # Polls at 0, 0.2 and 0.6 s; each opens router.json and the newest part at most.
    assert 2 <= fs.counts["open"] <= 8


def test_an_older_reader_reads_added_columns(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    row = make_row(0)
    (place,) = write_rows(layout, [row])
    path = layout.resolve(place.path)
    batch = pa.ipc.read_record_batch(
        pa.ipc.read_message(pa.py_buffer(path.read_bytes()[place.offset :])), SCHEMA
    ).append_column("later", pa.array([7]))
    head, body = bytes(batch.schema.serialize()), bytes(batch.serialize())
    path.write_bytes(head + body)
    crc = zlib.crc32(body)
    publish(layout, [rows_line(1, row, type(place)(place.path, len(head), len(body), crc))])
    (found,) = ShardReader(layout.root)
    assert (found["later"], found["rollout_id"]) == (7, "r0")


def test_a_line_cannot_lead_out_of_the_run_directory(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    row = make_row(0)
    (place,) = write_rows(layout, [row])
    publish(layout, [rows_line(1, row, msgspec.structs.replace(place, path="../other/x.arrows"))])
    with pytest.raises(ShardError, match="not inside the run directory"):
        list(ShardReader(layout.root))


def test_the_reader_needs_pyarrow_alone(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    fill(layout)
    program = textwrap.dedent("""
        import sys
        allowed = {"stages", "pyarrow"} | set(sys.stdlib_module_names)
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] not in allowed:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Refuse())
        sys.path[:0] = [sys.argv[1]]
        from stages.shards import ShardReader, row_to_json
        with ShardReader(sys.argv[2]) as reader:
            rows = list(reader)
        print(len(rows), sum(len(row_to_json(row)["token_ids"]) for row in rows))
        groups = list(ShardReader(sys.argv[2]).groups())
        print(len(groups), groups[0].rows[1]["created_at"].year, "msgspec" in sys.modules)
    """)
    root = str(Path(stages.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", program, root, str(layout.root)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stderr == ""
    assert result.stdout.split("\n")[:2] == ["12 112", "4 2023 False"]
