"""Handoff segments: what is acknowledged reads back, what is damaged is named."""

from __future__ import annotations

import asyncio
import errno
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import sharedfs
from stages.errors import SchemaError, ShardError
from stages.handoff import SegmentWriter, decode_record, encode_record, read_record, wait_record
from stages.layout import RunLayout
from stages.ranges import NotYetError
from stages.trajectory import Chain, RowRange, Trajectory
from tests.support.faults import FaultyFs
from tests.unit.stages_files.samples import chains, make_layout, make_result


def write(layout: RunLayout, count: int, **options: float) -> list[RowRange]:
    async def run() -> list[RowRange]:
        async with SegmentWriter(layout, "run-1", **options) as writer:  # type: ignore[arg-type]
            return list(await asyncio.gather(*(writer.append(make_result(n)) for n in range(count))))

    return asyncio.run(run())


@settings(deadline=None)
@given(st.lists(chains(), max_size=3), st.none() | st.binary(max_size=100))
def test_a_record_comes_back_as_it_was(streams: list[Chain], workspace: bytes | None) -> None:
    result = msgspec.structs.replace(make_result(1, workspace), trajectory=Trajectory(streams, []))
    data = encode_record(result)
    assert len(data) % 8 == 0
    assert decode_record(data, "here") == result


@settings(deadline=None)
@given(st.data())
def test_a_cut_or_changed_record_is_never_read(data: st.DataObject) -> None:
    good = encode_record(make_result(1, b"workspace"))
    with pytest.raises(ShardError):
        decode_record(good[: data.draw(st.integers(0, len(good) - 8))], "here")
    place = data.draw(st.integers(0, 27))
    changed = bytearray(good)
    changed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ShardError):
        decode_record(bytes(changed), "here")


def test_the_workspace_lies_raw_behind_the_body() -> None:
    blob = bytes(range(256)) * 16
    data = encode_record(make_result(1, blob))
    assert blob in data
    assert len(data) < len(blob) + 1024


def test_many_appends_share_fsyncs_and_are_aligned_and_readable(tmp_path: Path) -> None:
    layout, fs = make_layout(tmp_path), FaultyFs()
    with sharedfs.use(fs):
        places = write(layout, 600)
    assert fs.counts["fsync"] <= 6
    assert [read_record(layout.root, place).rollout_id for place in places] == [f"r{n}" for n in range(600)]
    assert {place.path for place in places} == {"handoff/run-1-0.seg"}
    end = 0
    for place in sorted(places, key=lambda place: place.offset):
        assert place.offset == end
        assert place.length % 8 == 0
        end += place.length
    assert end == layout.segment("run-1", 0).stat().st_size


def test_nothing_is_acknowledged_before_its_fsync_and_the_loop_goes_on(tmp_path: Path) -> None:
    layout, fs = make_layout(tmp_path), FaultyFs()

    async def run() -> None:
        async with SegmentWriter(layout, "run-1") as writer:
            await writer.append(make_result(0))
            fs.gate.clear()
            try:
                pending = asyncio.create_task(writer.append(make_result(1)))
                assert await asyncio.to_thread(fs.waiting.wait, 10)
                for _ in range(20):
                    await asyncio.sleep(0.001)
                assert not pending.done()
            finally:
                fs.gate.set()
            place = await pending
            assert (await wait_record(layout.root, place)).rollout_id == "r1"

    with sharedfs.use(fs):
        asyncio.run(run())


def test_rotation(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)

    async def run() -> list[RowRange]:
        async with SegmentWriter(layout, "run-1", rotate_bytes=1500) as writer:
            return [await writer.append(make_result(n, bytes(400))) for n in range(6)]

    places = asyncio.run(run())
    assert len({place.path for place in places}) == 3
    assert [read_record(layout.root, place).rollout_id for place in places] == [f"r{n}" for n in range(6)]


@pytest.mark.parametrize("fault", ["short", "enospc", "fsync", "create"])
def test_after_a_failure_a_new_file_holds_what_was_not_acknowledged(tmp_path: Path, fault: str) -> None:
    layout, fs = make_layout(tmp_path), FaultyFs()

    async def run() -> list[RowRange]:
        async with SegmentWriter(layout, "run-1") as writer:
            first = await writer.append(make_result(0))
            if fault == "short":
                fs.shorten("run-1-0")
            elif fault == "create":
                fs.fail("write", errno.EIO, "run-1-0")
                fs.fail("open", errno.ENOSPC, "run-1-1", times=1)
            else:
                fs.fail("write" if fault == "enospc" else "fsync", errno.ENOSPC, "run-1-0")
            rest = await asyncio.gather(*(writer.append(make_result(n)) for n in range(1, 4)))
            return [first, *rest]

    with sharedfs.use(fs):
        places = asyncio.run(run())
    later = "handoff/run-1-2.seg" if fault == "create" else "handoff/run-1-1.seg"
    assert [place.path for place in places] == ["handoff/run-1-0.seg", later, later, later]
    assert [read_record(layout.root, place).rollout_id for place in places] == ["r0", "r1", "r2", "r3"]


def test_a_full_disk_is_waited_for_and_leaves_no_empty_files(tmp_path: Path) -> None:
    layout, fs = make_layout(tmp_path), FaultyFs()
    fs.fail("write", errno.ENOSPC, times=4)
    with sharedfs.use(fs):
        (place,) = write(layout, 1)
    assert [path.name for path in layout.handoff.iterdir()] == [Path(place.path).name]


def test_a_failure_that_cannot_pass_is_raised_at_once(tmp_path: Path) -> None:
    layout, fs = make_layout(tmp_path), FaultyFs()
    fs.fail("open", errno.EACCES, "run-1-0")
    with sharedfs.use(fs), pytest.raises(ExceptionGroup) as raised:
        asyncio.run(_append_one(layout, 60.0))
    assert raised.group_contains(ShardError, match="Permission denied")


def test_the_deadline_names_what_was_waited_for(tmp_path: Path) -> None:
    layout, fs = make_layout(tmp_path), FaultyFs()
    fs.fail("write", errno.ENOSPC, times=-1)
    with sharedfs.use(fs), pytest.raises(ExceptionGroup) as raised:
        asyncio.run(_append_one(layout, 0.2))
    assert raised.group_contains(ShardError, match=r"not durable after \d+\.\d s of 0\.2 s.*No space left")


async def _append_one(layout: RunLayout, deadline_s: float) -> None:
    async with asyncio.TaskGroup() as tasks, SegmentWriter(layout, "run-1", deadline_s=deadline_s) as writer:
        await tasks.create_task(writer.append(make_result(0)))


def test_a_cancelled_caller_takes_nobody_along(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)

    async def run() -> RowRange:
        async with SegmentWriter(layout, "run-1") as writer:
            gone = asyncio.create_task(writer.append(make_result(0)))
            stays = asyncio.create_task(writer.append(make_result(1)))
            await asyncio.sleep(0)
            gone.cancel()
            return await stays

    assert read_record(layout.root, asyncio.run(run())).rollout_id == "r1"


def test_a_range_that_is_not_visible_yet_is_waited_for(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    (place,) = write(layout, 1)
    path = layout.resolve(place.path)
    whole = path.read_bytes()

    async def run(early: bytes | None) -> str:
        path.unlink()
        if early is not None:
            path.write_bytes(early)
        reading = asyncio.create_task(wait_record(layout.root, place, visibility_s=20))
        await asyncio.sleep(0.05)
        assert not reading.done()
        path.write_bytes(whole)
        return (await reading).rollout_id

    for early in (None, whole[:10], bytes(len(whole))):
        assert asyncio.run(run(early)) == "r0"


def test_what_never_becomes_visible_is_an_error_that_says_what_was_found(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    (place,) = write(layout, 1)
    path = layout.resolve(place.path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(NotYetError):
        read_record(layout.root, place)
    with pytest.raises(ShardError, match=rf"run-1-0\.seg: bytes 0\.\.{place.length} .*only .*waited 0\.1 s") as raised:
        asyncio.run(wait_record(layout.root, place, visibility_s=0.1))
    assert not isinstance(raised.value, NotYetError)
    assert raised.value.detail["length"] == place.length


def test_a_newer_record_version_is_refused_by_name() -> None:
    data = bytearray(encode_record(make_result(1)))
    struct.pack_into("<B", data, 4, 9)
    with pytest.raises(SchemaError, match="version 9, known is 2"):
        decode_record(bytes(data), "here")
