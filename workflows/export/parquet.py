"""Rollouts as Parquet with the shards' own schema, compressed with zstd."""

from __future__ import annotations

from collections.abc import Iterable

from stages import sharedfs
from stages.shards.parquet import write_parquet as write
from stages.shards.rows import ShardRow
from stages.shards.schema import SCHEMA


def write_parquet(rows: Iterable[ShardRow], file: sharedfs.AppendFile) -> None:
    """Write every chain of every row as a Parquet row; rows that never reached a shard have none."""
    write(rows, file, SCHEMA)
