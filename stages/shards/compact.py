"""Compaction: an ended run's committed rows rewritten to sealed Parquet, the shards removed, the seqs kept.

Order is what makes it safe at any moment: the Parquet files appear whole (temporary name, fsync, rename), are read back
and compared, then the record names them, and only then do shards go. Killed before the record, it has changed nothing
that readers look at; killed after, the next call removes the rest. Only rows that the index names are kept, so the last
router must have ended in order: one that died may have committed rows that only its successor publishes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stages import beacon, members, sharedfs
from stages.errors import ShardError
from stages.layout import RunLayout
from stages.shards.index import RowsLine, read_index
from stages.shards.parquet import COMPRESSED, Sink
from stages.shards.reader import ShardReader
from stages.shards.rows import ShardRow
from stages.shards.schema import SCHEMA
from stages.shards.sealed import Compaction, SealedFile, read_record, record_path
from stages.shards.version import SCHEMA_VERSION

GROUP_BYTES = 8 << 20
"""Of a row group before compression: what one random access decodes."""
FILE_BYTES = 1 << 30
"""Of a file before compression."""
_TOKEN_BYTES, _ROW_BYTES = 9, 2048


@dataclass(frozen=True)
class Compacted:
    """What one call did: rollouts rewritten, Parquet files and their bytes, shards removed and their bytes."""

    rollouts: int
    files: int
    bytes: int
    shards: int
    shard_bytes: int


def check_published(layout: RunLayout) -> None:
    """Raise ShardError unless the router left in order: what it had committed is in the index then, and not before."""
    found = beacon.read(layout)
    if found is not None and not found.ended:
        raise ShardError(
            f"{layout.root}: its router ({found.node}, pid {found.pid}) has not ended in order, so the index may lack "
            "committed rollouts: compact the run when it has ended; if the router died, resume it first"
        )


def check_ended(layout: RunLayout) -> None:
    """Raise ShardError while an EVAL worker of the run may be alive."""
    alive = sorted(name for name in members.names(layout) if name.startswith("eval"))
    if alive:
        raise ShardError(
            f"{layout.root}: worker {alive[0]} may still write: wait for it, "
            f"or remove members/{alive[0]}.json if you know it is dead"
        )


def compact(
    run_dir: Path, *, group_bytes: int = GROUP_BYTES, file_bytes: int = FILE_BYTES, force: bool = False
) -> Compacted:
    """Rewrite what is committed and not compacted yet; blocking.

    Args:
        run_dir: of a run whose router has ended in order, or that never had one.
        group_bytes: of a row group, before compression.
        file_bytes: of a file, before compression.
        force: whatever workers have left in members/, for a caller who knows that they are dead.

    Raises:
        ShardError: the run may still write or publish, a committed row cannot be read, or what was written reads back
            otherwise.
        OSError: the filesystem refuses; nothing that readers need is gone.
    """
    layout = RunLayout(run_dir)
    check_published(layout)
    if not force:
        check_ended(layout)
    before = read_record(layout)
    lines = [line for line in read_index(run_dir) if isinstance(line, RowsLine) and line.shard is not None]
    sealed = frozenset(before.replaced)
    fresh = [line for line in lines if line.seq > before.last_seq or line.shard not in sealed]
    shards = sorted({str(line.shard) for line in fresh})
    files: list[SealedFile] = []
    if fresh:
        with ShardReader(run_dir) as reader:
            for rows in _cut(map(reader.read, fresh), file_bytes):
                files.append(_write_file(layout, len(before.files) + len(files), rows, group_bytes))
        replaced = list(dict.fromkeys(before.replaced + shards))
        record = Compaction(before.v, SCHEMA_VERSION, before.files + files, replaced, fresh[-1].seq)
        sharedfs.write_atomic(record_path(layout), record.encode())
    removed = [_remove(layout.resolve(shard)) for shard in dict.fromkeys(before.replaced + shards)]
    gone = [size for size in removed if size is not None]
    return Compacted(len(fresh), len(files), sum(file.bytes for file in files), len(gone), sum(gone))


def _remove(path: Path) -> int | None:
    """Bytes of the shard that is gone now; None where it was gone before."""
    if not sharedfs.exists(path):
        return None
    size = sharedfs.stat_size(path)
    sharedfs.unlink(path)
    return size


def _cut(rows: Iterable[ShardRow], limit: int) -> Iterator[list[ShardRow]]:
    """Runs of rows of about `limit` bytes; their batches are maps of the shards, so a run costs little memory."""
    waiting: list[ShardRow] = []
    size = 0
    for row in rows:
        waiting.append(row)
        size += _bytes(row)
        if size >= limit:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


def _bytes(row: ShardRow) -> int:
    """Bytes of a rollout, roughly: Arrow's own count of a slice takes a millisecond."""
    said = len(row["messages"] or "") if row.chains else 0
    return said + sum(_TOKEN_BYTES * len(chain.array("token_ids")) + _ROW_BYTES for chain in row.chains)


def _tables(rows: list[ShardRow], group_bytes: int) -> Iterator[tuple[int, pa.Table]]:
    """First seq and rows of each row group."""
    for group in _cut(rows, group_bytes):
        yield (
            group[0].seq,
            pa.Table.from_batches([row.batch.select(SCHEMA.names) for row in group if row.batch], SCHEMA),
        )


def _write_file(layout: RunLayout, number: int, rows: list[ShardRow], group_bytes: int) -> SealedFile:
    path = layout.shards / f"compacted-{number}.parquet"
    first_seqs = []
    with sharedfs.atomic_file(path) as file:
        with pq.ParquetWriter(Sink(file), SCHEMA, write_page_checksum=True, **COMPRESSED) as writer:
            for first, table in _tables(rows, group_bytes):
                writer.write_table(table, row_group_size=table.num_rows)
                first_seqs.append(first)
        size = file.length
    _compare(path, (table for _, table in _tables(rows, group_bytes)))
    return SealedFile(layout.relative(path), size, first_seqs)


def _compare(path: Path, tables: Iterable[pa.Table]) -> None:
    """Raise ShardError unless the file's row groups hold exactly these tables."""
    mapped = sharedfs.map_file(path)
    file = pq.ParquetFile(pa.BufferReader(pa.py_buffer(mapped or b"")), page_checksum_verification=True)
    for number, table in itertools.zip_longest(range(file.num_row_groups), tables):
        if number is None or table is None or not _same(file.read_row_group(number), table):
            raise ShardError(f"{path}: row group {number} reads back otherwise than it was written: the shards stay")


def _same(left: pa.Table, right: pa.Table) -> bool:
    if left.equals(right):
        return True
    # Arrow says that NaN differs from itself; text does not.
    return left.schema.equals(right.schema) and repr(left.to_pylist()) == repr(right.to_pylist())
