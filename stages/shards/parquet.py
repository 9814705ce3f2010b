"""Writes rollouts to one Parquet file, zstd-compressed, through an append-only sink."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from stages import sharedfs
from stages.shards.rows import ShardRow

_GROUP_BYTES = 64 << 20

_NUMBERS = ("token_ids.list.element", "logprobs.list.element")
COMPRESSED: Final[dict[str, Any]] = {
    "compression": "zstd",
    "use_dictionary": [
        "run_id", "group_id", "task_id", "tag", "workflow", "task", "agent", "model", "model_digest",
        "tokenizer_digest", "template_digest", "status", "grading", "logprobs_mode",
    ],
    "column_encoding": dict.fromkeys(_NUMBERS, "BYTE_STREAM_SPLIT"),
}  # fmt: skip
"""Options of the writer. Log-probs and token ids have bytes that compress and bytes that do not: they are split."""


class Sink:
    """What pyarrow needs of a file object, on an AppendFile."""

    closed = False

    def __init__(self, file: sharedfs.AppendFile) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        """Append; raises what AppendFile raises."""
        self._file.append(data)
        return len(data)

    def tell(self) -> int:
        """Bytes so far."""
        return self._file.length

    def flush(self) -> None:
        """Nothing is buffered here; the owner of the file syncs it."""

    def close(self) -> None:
        """The file itself stays open for its owner."""
        self.closed = True


def write_parquet(rows: Iterable[ShardRow], file: sharedfs.AppendFile, schema: pa.Schema) -> None:
    """One Parquet row a chain, in row groups of about 64 MiB before compression; null-shard rows are left out.

    A column of a row's shard that `schema` has not is dropped; all else keeps its type.
    """
    with pq.ParquetWriter(Sink(file), schema, **COMPRESSED) as writer:
        waiting: list[pa.RecordBatch] = []
        size = 0
        for row in rows:
            if row.batch is None:
                continue
            waiting.append(row.batch.select(schema.names))
            size += row.batch.nbytes
            if size >= _GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(waiting, schema))
                waiting, size = [], 0
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting, schema))
