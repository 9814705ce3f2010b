"""JSON lines: one object a chain with all columns, as a dataset loader wants them, or an adapter's objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from stages import sharedfs
from stages.shards.rows import ShardRow, chain_to_json

_FLUSH_BYTES = 4 << 20
_encoder = msgspec.json.Encoder()


def write_lines(objects: Iterable[Mapping[str, Any]], file: sharedfs.AppendFile) -> None:
    """Write every object as a line."""
    waiting = bytearray()
    for one in objects:
        waiting += _encoder.encode(one) + b"\n"
        if len(waiting) >= _FLUSH_BYTES:
            file.append(bytes(waiting))
            waiting.clear()
    if waiting:
        file.append(bytes(waiting))


def write_jsonl(rows: Iterable[ShardRow], file: sharedfs.AppendFile) -> None:
    """Write every chain of every row as a line; rows that never reached a shard have none."""
    write_lines((chain_to_json(chain) for row in rows for chain in row.chains), file)
