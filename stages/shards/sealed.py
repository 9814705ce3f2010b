"""Reads compacted rollouts: Parquet files in seq order, found through shards/compacted.json; needs pyarrow alone.

The index is never rewritten: its lines go on naming the shard that a rollout was committed to, and the record of the
compaction says which shards are gone and which Parquet row group holds a seq instead.
"""

from __future__ import annotations

import bisect
import json
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from stages import ranges, sharedfs
from stages.errors import SchemaError, ShardError
from stages.layout import RunLayout
from stages.shards.mapped import Place, by_rollout, check_version
from stages.shards.version import SCHEMA_VERSION

RECORD_VERSION = 1
_CACHED_GROUPS = 4


@dataclass(frozen=True)
class SealedFile:
    """One Parquet file: its path in the run directory, its size in bytes, and the first seq of each row group."""

    path: str
    bytes: int
    first_seqs: list[int]


@dataclass(frozen=True)
class Compaction:
    """What shards/compacted.json holds: Parquet files in seq order, and of which shards and up to which seq."""

    v: int
    schema_version: int
    files: list[SealedFile]
    replaced: list[str]
    last_seq: int

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"


NOTHING = Compaction(RECORD_VERSION, SCHEMA_VERSION, [], [], 0)


def record_path(layout: RunLayout) -> Path:
    """Where the record of the compaction lies."""
    return layout.shards / "compacted.json"


def read_record(layout: RunLayout) -> Compaction:
    """The record as visible now, `NOTHING` where the run was never compacted.

    Raises:
        SchemaError: written by a newer version.
        ShardError: unreadable.
    """
    path = record_path(layout)
    try:
        raw = json.loads(sharedfs.read_bytes(path))
        if raw["v"] > RECORD_VERSION:
            raise SchemaError(f"{path}: version {raw['v']}, known is {RECORD_VERSION}: read it with a newer rollmill")
        files = [SealedFile(file["path"], file["bytes"], file["first_seqs"]) for file in raw["files"]]
        return Compaction(raw["v"], raw["schema_version"], files, raw["replaced"], raw["last_seq"])
    except FileNotFoundError:
        return NOTHING
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, OSError) and error.errno in ranges.STALE:
            return NOTHING
        raise ShardError(f"{path}: not the record of a compaction: {error!r}") from error


class SealedBatches:
    """Reads rollouts of replaced shards; keeps files open and the last row groups decoded. For one thread."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._files: dict[str, Any] = {}
        self._groups: OrderedDict[tuple[str, int], tuple[pa.RecordBatch, dict[str, tuple[int, int]]]] = OrderedDict()
        self._replaced: frozenset[str] = frozenset()
        self._last_seq = 0
        self._starts: list[tuple[int, str, int]] = []
        self.refresh()

    def refresh(self) -> None:
        """Read the record anew."""
        record = read_record(self._layout)
        self._replaced, self._last_seq = frozenset(record.replaced), record.last_seq
        self._starts = [(seq, file.path, number) for file in record.files for number, seq in enumerate(file.first_seqs)]

    def hold(self, shard: str, seq: int) -> bool:
        """Whether this shard's rollout of this seq is compacted: what the index got later never is."""
        return seq <= self._last_seq and shard in self._replaced

    def read(self, seq: int, rollout_id: str) -> Place:
        """The row group that holds this seq, and the rollout's first row and number of rows in it.

        Raises:
            SchemaError: the file is of a newer schema.
            ShardError: absent, damaged (each page's crc is checked), or without the rollout.
        """
        place = bisect.bisect_right(self._starts, seq, key=lambda start: start[0]) - 1
        if place < 0:
            raise ShardError(f"{record_path(self._layout)}: no row group holds seq {seq}: the record is damaged")
        _, path, number = self._starts[place]
        batch, rollouts = self._group(path, number)
        if rollout_id not in rollouts:
            raise ShardError(f"{self._layout.root / path}: row group {number} has no rollout {rollout_id!r}")
        return batch, *rollouts[rollout_id]

    def close(self) -> None:
        """Let go of all files."""
        self._groups.clear()
        self._files.clear()

    def _group(self, path: str, number: int) -> tuple[pa.RecordBatch, dict[str, tuple[int, int]]]:
        key = (path, number)
        found = self._groups.get(key)
        if found is None:
            try:
                table = self._open(path).read_row_group(number).combine_chunks()
            except (pa.ArrowException, OSError) as error:
                raise ShardError(f"{self._layout.root / path}: row group {number} cannot be read: {error}") from error
            (batch,) = table.to_batches()
            found = self._groups[key] = (batch, by_rollout(batch))
            if len(self._groups) > _CACHED_GROUPS:
                self._groups.popitem(last=False)
        else:
            self._groups.move_to_end(key)
        return found

    def _open(self, path: str) -> Any:
        if path not in self._files:
            import pyarrow.parquet as pq  # a tenth of a second that readers of open runs need not spend

            where = self._layout.resolve(path)
            mapped = sharedfs.map_file(where)
            file = pq.ParquetFile(pa.BufferReader(pa.py_buffer(mapped or b"")), page_checksum_verification=True)
            check_version(where, file.schema_arrow)
            self._files[path] = file
        return self._files[path]
