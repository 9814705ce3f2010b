"""Shards as written: exact ranges, one batch a group commit, golden schema."""

from __future__ import annotations

import asyncio
import errno
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages import sharedfs
from stages.errors import ShardError
from stages.layout import RunLayout
from stages.shards.schema import SCHEMA, rows_to_batch, schema_message
from stages.shards.writer import ShardWriter, write_schema
from stages.trajectory import Row, RowRange, Trajectory
from tests.support.faults import FaultyFs
from tests.unit.stages_files.samples import make_chain, make_layout, make_row, rows, write_rows

CHAIN = ("prompt_length", "token_ids", "loss_mask", "logprobs", "policy_versions", "turns")
GOLDEN = Path(__file__).with_name("schema-v1.txt")


def read_batch(layout: RunLayout, place: RowRange) -> pa.RecordBatch:
    data = sharedfs.read_range(layout.resolve(place.path), place.offset, place.length)
    assert zlib.crc32(data) == place.crc32
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(data)), SCHEMA)
    batch.validate(full=True)
    return batch


def expected(row: Row, number: int) -> dict[str, Any]:
    """The Arrow row of a chain, written down apart from the writer."""
    chain = row.trajectory.chains[number] if row.trajectory.chains else make_chain(0, 0)
    record = msgspec.structs.asdict(row)
    for name in ("model", "trajectory"):
        del record[name]
    record |= msgspec.structs.asdict(row.model)
    record |= {name: msgspec.to_builtins(getattr(chain, name)) for name in CHAIN}
    record |= {name: msgspec.to_builtins(getattr(row, name)) for name in ("sampling", "timing")}
    record |= {
        "chain": number,
        "logprobs_mode": row.trajectory.logprobs_mode,
        "min_policy_version": min((span.version for span in chain.policy_versions), default=None),
        "routed_experts": None,
        "messages": msgspec.json.encode(row.trajectory.messages).decode() if number == 0 else None,
        "reward_parts": list(row.reward_parts.items()),
        "created_at": datetime.fromtimestamp(row.created_at, UTC),
        "finished_at": datetime.fromtimestamp(row.finished_at, UTC),
    }
    return {name: record[name] for name in SCHEMA.names}


def test_the_schema_is_the_contract(tmp_path: Path) -> None:
    assert SCHEMA.to_string(truncate_metadata=False, show_field_metadata=False) + "\n" == GOLDEN.read_text()
    layout = make_layout(tmp_path)
    write_schema(layout)
    assert pa.ipc.read_schema(pa.py_buffer(layout.schema().read_bytes())).equals(SCHEMA, check_metadata=True)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(rows(), min_size=1, max_size=4, unique_by=lambda row: row.rollout_id))
def test_every_column_of_every_row_comes_back(drawn: list[Row]) -> None:
    batch = rows_to_batch(drawn)
    batch.validate(full=True)
    wanted = [expected(row, number) for row in drawn for number in range(max(1, len(row.trajectory.chains)))]
    assert batch.to_pylist() == wanted


def test_ranges_are_exactly_one_message_and_a_batch_holds_several_rollouts(tmp_path: Path) -> None:
    layout, fs = make_layout(tmp_path), FaultyFs()
    count = 150
    written = [make_row(n, [make_chain()] * (n % 3)) for n in range(count)]
    with sharedfs.use(fs):
        places = write_rows(layout, written)
    assert len(set(places)) == 3  # 64 + 64 + 22
    assert fs.counts["fsync"] <= 2 + 3  # directory, schema, batches
    end = len(schema_message())
    for place in sorted(set(places), key=lambda place: place.offset):
        assert (place.offset, place.length % 8) == (end, 0)
        end += place.length
    data = layout.shard("eval-1-3f9a", 0).read_bytes()
    assert (len(data), data[: len(schema_message())]) == (end, schema_message())
    for row, place in zip(written, places, strict=True):
        mine = [record for record in read_batch(layout, place).to_pylist() if record["rollout_id"] == row.rollout_id]
        assert mine == [expected(row, number) for number in range(max(1, len(row.trajectory.chains)))]
    assert pa.ipc.open_stream(data).read_all().num_rows == sum(max(1, n % 3) for n in range(count))


def test_a_big_rollout_has_a_batch_of_its_own(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    written = [make_row(n, [make_chain(500_000)]) for n in range(3)]
    assert len(set(write_rows(layout, written))) == 3


def test_two_attempts_of_one_rollout_never_share_a_batch(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    again = msgspec.structs.replace(make_row(1), attempt=2)
    places = write_rows(layout, [make_row(0), make_row(1), again, make_row(2)])
    assert places[0] == places[1] == places[3] != places[2]
    assert read_batch(layout, places[2])["attempt"].to_pylist() == [2]


def test_the_schema_is_durable_before_the_first_batch_is_written(tmp_path: Path) -> None:
    layout, fs = make_layout(tmp_path), FaultyFs()
    fs.fail("fsync", errno.EIO, "eval-1-3f9a-0")
    with sharedfs.use(fs):
        (place,) = write_rows(layout, [make_row(0)])
    assert place.path == "shards/eval-1-3f9a-1.arrows"
    assert not layout.shard("eval-1-3f9a", 0).exists()
    calls = [op for op, name in fs.log if name == "eval-1-3f9a-1.arrows"]
    assert calls == ["open", "write", "fsync", "write", "fsync"]


@pytest.mark.parametrize("fault", ["short", "enospc", "fsync"])
def test_after_a_failure_a_new_shard_holds_what_was_not_acknowledged(tmp_path: Path, fault: str) -> None:
    layout, fs = make_layout(tmp_path), FaultyFs()

    async def run() -> list[RowRange]:
        async with ShardWriter(layout, "eval-1") as writer:
            first = await writer.append(make_row(0))
            if fault == "short":
                fs.shorten("eval-1-0")
            else:
                fs.fail("write" if fault == "enospc" else "fsync", errno.ENOSPC, "eval-1-0")
            return [first, *await asyncio.gather(*(writer.append(make_row(n)) for n in range(1, 4)))]

    with sharedfs.use(fs):
        places = asyncio.run(run())
    assert [place.path for place in places] == ["shards/eval-1-0.arrows"] + ["shards/eval-1-1.arrows"] * 3
    for number, place in enumerate(places):
        assert f"r{number}" in read_batch(layout, place)["rollout_id"].to_pylist()


def test_rotation_begins_each_file_with_the_schema(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)

    async def run() -> list[RowRange]:
        async with ShardWriter(layout, "eval-1", rotate_bytes=15_000) as writer:
            return [await writer.append(make_row(n)) for n in range(6)]

    places = asyncio.run(run())
    files = {place.path for place in places}
    assert len(files) > 1
    for path in files:
        assert pa.ipc.open_stream(layout.resolve(path).read_bytes()).read_all().num_rows >= 1


def bad_rows() -> dict[str, tuple[Row, str]]:
    chain = make_chain()
    replace = msgspec.structs.replace

    def of(changed: Any) -> Row:
        return make_row(1, [changed])

    return {
        "lengths": (of(replace(chain, packed_logprobs=bytes(4))), r"lengths \(6, 6, 1\)"),
        "prompt": (of(replace(chain, prompt_length=7)), "prompt_length 7"),
        "turn": (of(replace(chain, turns=[replace(chain.turns[0], end=9)])), r"\[2, 9\)"),
        "torn": (of(replace(chain, packed_ids=chain.packed_ids[:-1])), r"lengths \(5.75, 6, 6\)"),
        "text": (replace(make_row(1), nodes=[7]), "rollouts .'r1'.*does not fit"),
    }


@pytest.mark.parametrize("name", list(bad_rows()))
def test_a_row_that_cannot_be_written_fails_alone(tmp_path: Path, name: str) -> None:
    layout = make_layout(tmp_path)
    bad, message = bad_rows()[name]

    async def run() -> list[RowRange | BaseException]:
        async with ShardWriter(layout, "eval-1") as writer:
            written = [make_row(0), bad, make_row(2)]
            return list(await asyncio.gather(*(writer.append(row) for row in written), return_exceptions=True))

    first, failed, last = asyncio.run(run())
    assert isinstance(first, RowRange)
    assert isinstance(last, RowRange)
    with pytest.raises(ShardError, match=message):
        raise failed if isinstance(failed, BaseException) else AssertionError(failed)


def test_messages_can_be_left_out() -> None:
    batch = rows_to_batch([make_row(0)], messages=False)
    assert batch["messages"].to_pylist() == [None]


def test_a_rollout_without_chains_has_one_row_with_empty_lists() -> None:
    row = msgspec.structs.replace(make_row(0), trajectory=Trajectory([], []))
    (record,) = rows_to_batch([row]).to_pylist()
    assert (record["chain"], record["token_ids"], record["turns"], record["min_policy_version"]) == (0, [], [], None)
