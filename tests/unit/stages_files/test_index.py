"""The index by its reader's rule: epochs cut, torn tails wait, zombies never surface."""

from __future__ import annotations

import errno
import json
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import sharedfs
from stages.errors import SchemaError, ShardError
from stages.layout import RunLayout
from stages.shards.index import IndexFollower, IndexLine, RowsLine, read_index
from stages.shards.index_writer import IndexWriter
from tests.support.faults import FaultyFs
from tests.unit.stages_files.samples import group_line, make_layout, make_row, publish, rows_line


def make_line(seq: int, author: str = "") -> RowsLine:
    row = msgspec.structs.replace(make_row(seq), rollout_id=f"{author}{seq}")
    return rows_line(seq, row, None)


def header(epoch: int, after: int) -> bytes:
    return json.dumps({"v": 1, "epoch": epoch, "after_seq": after}).encode() + b"\n"


def text(seq: int, author: str = "") -> bytes:
    return msgspec.json.encode(make_line(seq, author)) + b"\n"


def ids(layout: RunLayout, after: int = 0) -> list[str]:
    return [line.rollout_id for line in read_index(layout.root, after) if isinstance(line, RowsLine)]


def test_what_is_written_is_read_and_is_the_contract(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    lines: list[IndexLine] = [make_line(1), make_line(2), group_line(3, "g0", ["1", "2"])]
    publish(layout, lines)
    assert read_index(layout.root) == lines
    assert read_index(layout.root, 2) == lines[2:]
    first, row, _, group = layout.index_part(1, 0).read_bytes().splitlines()
    assert json.loads(first) == {"v": 1, "epoch": 1, "after_seq": 0}
    assert list(json.loads(row)) == [
        "type", "seq", "rollout_id", "group_id", "task_id", "tag", "status", "failure_class", "reward", "mask_sample",
        "min_policy_version", "shard", "offset", "length", "crc32", "chains",
    ]  # fmt: skip
    assert list(json.loads(group)) == ["type", "seq", "group_id", "tag", "closed_by", "usable", "rollout_ids"]


class Disk:
    """An index written by honest and dead routers alike, and what a reader must make of it."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        self.truth: list[str] = []
        self.heads: list[tuple[tuple[int, int], int]] = []
        self.torn: dict[tuple[int, int], bytes] = {}

    def begin(self, key: tuple[int, int], after: int, whole: bool) -> None:
        data = header(key[0], after)
        self.layout.index_part(*key).write_bytes(data if whole else data[:7])
        self.heads.append((key, after))
        if whole:
            del self.truth[after:]
        else:
            self.torn[key] = b""  # its author died in the header: it never counts

    def append(self, which: int, author: str, cut: int) -> None:
        place = which % len(self.heads)
        key, seq = self.heads[place]
        if key in self.torn:
            return
        line = text(seq + 1, author)
        with self.layout.index_part(*key).open("ab") as file:
            file.write(line if cut == 0 else line[: min(cut, len(line) - 1)])
        if cut:
            self.torn[key] = line
            return
        self.heads[place] = (key, seq + 1)
        if key == max(other for other, _ in self.heads if self.torn.get(other) != b""):
            self.truth.append(f"{author}{seq + 1}")


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    step = st.tuples(
        st.sampled_from(["append", "append", "append", "zombie", "epoch", "part", "poll"]),
        st.integers(0, 50),
        st.sampled_from([0, 0, 0, 0, 1, 5, 60]),
    )
    return draw(st.lists(step, max_size=60))


@settings(max_examples=100, deadline=None)
@given(histories())
def test_no_line_of_a_zombie_and_no_torn_line_ever_surfaces(history: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        disk = Disk(make_layout(Path(name)))
        disk.begin((1, 0), 0, True)
        follower, given_out = IndexFollower(disk.layout.root), list[str]()
        for step, (what, number, cut) in enumerate(history):
            (epoch, part), _ = disk.heads[-1]
            if what == "append":
                disk.append(-1, f"{epoch}.{part}.{step}-", cut)
            elif what == "zombie":
                disk.append(number, f"any.{step}-", cut)
            elif what == "poll":
                given_out += [line.rollout_id for line in follower.poll() if isinstance(line, RowsLine)]
            else:
                key = (epoch + 1, 0) if what == "epoch" else (epoch, part + 1)
                disk.begin(key, max(0, len(disk.truth) - number % 4), cut != 1)
            if what == "poll":
                expected_now = disk.truth[len(given_out) :]
                assert expected_now == []
        assert ids(disk.layout) == disk.truth
        for after in (0, len(disk.truth) // 2, len(disk.truth), len(disk.truth) + 3):
            assert ids(disk.layout, after) == disk.truth[after:]
        before = len(given_out)
        given_out += [line.rollout_id for line in follower.poll() if isinstance(line, RowsLine)]
        assert given_out[before:] == disk.truth[before:]
        assert [int(author.rpartition("-")[2]) for author in given_out] == list(range(1, len(given_out) + 1))


def test_a_torn_last_line_is_not_there_yet(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    path, line = layout.index_part(1, 0), text(2)
    path.write_bytes(header(1, 0) + text(1) + line[:20])
    follower = IndexFollower(layout.root)
    assert [found.seq for found in follower.poll()] == [1]
    assert follower.poll() == []
    path.write_bytes(header(1, 0) + text(1) + line)
    assert [found.seq for found in follower.poll()] == [2]


def test_a_hole_of_zeros_is_not_there_yet(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    path, line = layout.index_part(1, 0), text(1)
    path.write_bytes(header(1, 0) + bytes(len(line)) + b"\n" + text(2))
    follower = IndexFollower(layout.root)
    assert follower.poll() == []
    path.write_bytes(header(1, 0) + line + text(2))
    assert [found.seq for found in follower.poll()] == [1, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{nonsense}\n", "not an index line"),
        (b'{"type":"other","seq":2}\n', "not an index line"),
        (b'{"type":"rows","seq":2}\n', "not an index line"),
        (b"[]\n", "not an index line"),
        (text(7), "seq 7 where 2 must be"),
    ],
)
def test_a_damaged_line_in_the_middle_names_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    layout = make_layout(tmp_path)
    layout.index_part(1, 0).write_bytes(header(1, 0) + text(1) + line + text(3))
    follower = IndexFollower(layout.root)
    with pytest.raises(ShardError, match=rf"000001-000000\.jsonl line 3: .*{message}"):
        follower.poll()


def test_new_fields_are_ignored_and_a_newer_version_is_refused(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    extra = json.loads(text(1)) | {"later": 1}
    layout.index_part(1, 0).write_bytes(header(1, 0) + json.dumps(extra).encode() + b"\n")
    assert ids(layout) == ["1"]
    layout.index_part(2, 0).write_bytes(b'{"v":2,"epoch":2,"after_seq":1}\n')
    with pytest.raises(SchemaError, match=r"000002-000000\.jsonl line 1: index version 2, known is 1"):
        read_index(layout.root)


def test_a_follower_lists_the_directory_once_and_finds_later_parts_by_name(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    follower = IndexFollower(layout.root)
    assert follower.poll() == []
    publish(layout, [make_line(1)], epoch=1)
    assert [line.seq for line in follower.poll()] == [1]
    layout.index_part(1, 1).write_bytes(header(1, 1) + text(2))
    assert [line.seq for line in follower.poll()] == [2]
    publish(layout, [make_line(3)], epoch=2, after=2)
    assert [line.seq for line in follower.poll()] == [3]
    publish(layout, [make_line(4)], epoch=9, after=3)
    assert follower.poll() == []
    sharedfs.write_atomic(layout.router_json, b'{"epoch":9}')
    assert [line.seq for line in follower.poll()] == [4]


def test_a_poll_gives_at_most_its_limit(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    publish(layout, [make_line(seq) for seq in range(1, 8)])
    follower = IndexFollower(layout.root)
    assert [[line.seq for line in follower.poll(3)] for _ in range(4)] == [[1, 2, 3], [4, 5, 6], [7], []]


def test_parts_rotate_and_read_as_one(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    with IndexWriter(layout, 1, 0, rotate_bytes=500) as index:
        for seq in range(1, 10):
            assert index.publish([make_line(seq)]) == seq
    assert len(list(layout.index.iterdir())) > 2
    assert ids(layout) == [str(seq) for seq in range(1, 10)]


def test_lines_out_of_order_are_refused_and_not_taken(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    with IndexWriter(layout, 1, 4) as index:
        with pytest.raises(ShardError, match="seq 7 where 6 must be"):
            index.publish([make_line(5), make_line(7)])
        assert index.publish([make_line(5), make_line(6)]) == 6
    assert ids(layout, 4) == ["5", "6"]


@pytest.mark.parametrize("fault", ["short", "write", "fsync"])
def test_a_broken_part_is_left_and_its_lines_are_written_anew(tmp_path: Path, fault: str) -> None:
    layout, fs = make_layout(tmp_path), FaultyFs()
    with sharedfs.use(fs), IndexWriter(layout, 1, 0) as index:
        index.publish([make_line(1)])
        if fault == "short":
            fs.shorten("000001-000000")
        else:
            fs.fail(fault, errno.EIO, "000001-000000")
        assert index.publish([make_line(2), make_line(3)]) == 3
    assert layout.index_part(1, 1).read_bytes() == header(1, 1).replace(b" ", b"") + text(2) + text(3)
    assert ids(layout) == ["1", "2", "3"]


def test_lines_outlive_a_full_disk(tmp_path: Path) -> None:
    layout, fs = make_layout(tmp_path), FaultyFs()
    follower = IndexFollower(layout.root)
    with sharedfs.use(fs), IndexWriter(layout, 1, 0) as index:
        index.publish([make_line(1)])
        fs.fail("write", errno.ENOSPC, times=6)
        for lines in ([make_line(2)], [make_line(3)], []):
            with pytest.raises(OSError, match="No space") as raised:
                index.publish(lines)
            assert raised.value.errno == errno.ENOSPC
            assert index.durable_seq == 1
        assert index.publish([make_line(4)]) == 4
        assert [line.seq for line in follower.poll()] == [1, 2, 3, 4]
    assert sorted(path.name for path in layout.index.iterdir()) == ["000001-000000.jsonl", "000001-000001.jsonl"]
