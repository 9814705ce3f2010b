"""Published lines by seq and by id: what a router knows of them after it wrote them, and after it only found them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages import sharedfs
from stages.errors import ShardError
from stages.ledger.effects import Failed
from stages.router import published as module
from stages.router.failures import FailuresFile, known_up_to
from stages.router.places import EndedIds, group_name
from stages.router.published import Published
from stages.shards.index import GroupLine, IndexLine, RowsLine, read_index
from stages.shards.index_writer import IndexWriter
from tests.support.faults import FaultyFs
from tests.support.routers import make_run


def lines(first: int, groups: int, n: int = 3) -> list[IndexLine]:
    """`groups` groups of n from seq `first` on; the group's number follows from the seq."""
    found: list[IndexLine] = []
    seq = first
    for _ in range(groups):
        group = group_name((seq - 1) // (n + 1) + 1)
        for i in range(n):
            found.append(RowsLine(
                seq=seq, rollout_id=f"{group}-{i}", group_id=group, task_id="t", tag="a", status="completed",
                failure_class=None, reward=1.0, mask_sample=False, min_policy_version=None, shard=None, offset=None,
                length=None, crc32=None, chains=0,
            ))  # fmt: skip
            seq += 1
        ids = [f"{group}-{i}" for i in range(n)]
        found.append(GroupLine(seq=seq, group_id=group, tag="a", closed_by="complete", usable=n, rollout_ids=ids))
        seq += 1
    return found


async def test_lines_of_all_epochs_and_parts_are_found_as_readers_find_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_run(tmp_path / "run")
    all_lines = lines(1, 30)
    with IndexWriter(layout, 1, 0, rotate_bytes=2000) as first:
        for start in range(0, 48, 7):
            first.publish(all_lines[start : min(start + 7, 48)])
        with IndexWriter(layout, 3, 40, rotate_bytes=3000) as second:
            second.open()
            first.publish(all_lines[48:60])  # a zombie: cut at 40
            for start in range(40, 120, 9):
                second.publish(all_lines[start : start + 9])
    with layout.index_part(3, 0).open("ab"), layout.index_part(4, 0).open("wb") as torn:
        torn.write(b'{"v":1,"epo')
    monkeypatch.setattr(module, "_BLOCK", 700)
    found = Published(layout)
    found.load()
    assert len(found) == 120 == len(read_index(layout.root))
    for line in all_lines:
        text = await found.line(line.seq)
        assert text["seq"] == line.seq and text["type"] == line.type
        known = found.ids.rollout(line.rollout_id) if isinstance(line, RowsLine) else found.ids.group(line.group_id)
        assert known == line.seq
    seq, read = 0, 0
    while texts := await found.texts(seq, 50):
        seq, read = seq + len(texts), read + len(texts)
    assert read == 120
    assert await found.texts(120, 5) == []


async def test_a_hole_ends_what_is_out(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    with IndexWriter(layout, 1, 0) as first:
        first.publish(lines(1, 2))
    with IndexWriter(layout, 2, 20) as second:
        second.publish(lines(21, 1))
    found = Published(layout)
    found.load()
    assert len(found) == 8 == len(read_index(layout.root))


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    with IndexWriter(layout, 1, 0) as index:
        index.publish(lines(1, 2))
    path = layout.index_part(1, 0)
    path.write_bytes(path.read_bytes().replace(b'"seq":3', b'"seq":x'))
    with pytest.raises(ShardError, match="000001-000000"):
        Published(layout).load()


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), unique_by=lambda pair: pair[0], max_size=15),
    st.randoms(use_true_random=False),
)
def test_ids_of_any_order_of_ends_are_found_and_no_others(groups: list[tuple[int, int]], random: object) -> None:
    ids, expected, seq = EndedIds(), {}, 0
    for number, n in groups:
        order = list(range(n))
        random.shuffle(order)  # type: ignore[attr-defined]
        for i in order:
            seq += 1
            ids.add_row(f"{group_name(number)}-{i}", seq)
            expected[f"{group_name(number)}-{i}"] = seq
        if number % 3:  # the others stay open
            seq += 1
            ids.add_group(group_name(number), seq)
            assert ids.group(group_name(number)) == seq
    for number in range(45):
        for i in range(8):
            name = f"{group_name(number)}-{i}"
            assert ids.rollout(name) == expected.get(name)
    for odd in (
        "",
        "g",
        "g1-0",
        "g000001",
        "x000001-0",
        "g000001-00",
        "g000001--1",
        "g٣00001-0",
        "g" + "9" * 30 + "-0",
    ):
        assert ids.rollout(odd) is None
        assert ids.group(odd) is None or odd in {group_name(number) for number, _ in groups}


def failed(seq: int) -> Failed:
    return Failed(seq, {"seq": seq, "class": "llm"})


def test_failures_survive_a_bad_disk_and_a_restart_once_each(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    file = FailuresFile(layout, [])
    file.take([failed(2), failed(5)])
    file.write()
    file.take([failed(6)])
    fs = FaultyFs()
    fs.fail("fsync", errno.ENOSPC)
    with sharedfs.use(fs), pytest.raises(OSError):
        file.write()
    file.take([failed(9)])
    file.write()
    file.close()
    assert [len(known_up_to(layout, seq)) for seq in (1, 5, 8, 100)] == [0, 2, 3, 4]
    again = FailuresFile(layout, known_up_to(layout, 6))
    again.take([failed(9)])
    again.write()
    again.close()
    assert len(known_up_to(layout, 100)) == 4
    assert not [p for p in layout.root.iterdir() if p.name.endswith(".tmp")]
