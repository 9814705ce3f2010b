"""Record batches by range out of memory-mapped shard files, each range's crc checked once."""

from __future__ import annotations

import mmap
from collections import OrderedDict
from pathlib import Path

import pyarrow as pa

from stages import ranges, sharedfs
from stages.errors import SchemaError, ShardError
from stages.layout import RunLayout
from stages.shards.version import SCHEMA_VERSION, VERSION_KEY

_CACHED_BATCHES = 1024
"""Decoded batches are pointers into maps: some 30 KB each, for a file read at random that else costs 0.6 ms."""


Place = tuple[pa.RecordBatch, int, int]
"""A batch, and one rollout's first row and number of rows in it."""


class _File:
    """One shard file: its map at the size seen last, its schema, and the offsets whose crc was right."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.map: mmap.mmap | None = None
        self.schema: pa.Schema | None = None
        self.checked: set[int] = set()

    def bytes(self, offset: int, length: int) -> memoryview:
        """The visible bytes of a range, mapping the file anew when it may have grown."""
        try:
            if self.map is None or len(self.map) < offset + length:
                self.map = sharedfs.map_file(self.path)
        except OSError as error:
            raise ranges.from_os_error(self.path, offset, length, error) from error
        return memoryview(self.map or b"")[offset : offset + length]

    def read_schema(self, offset: int) -> pa.Schema:
        """The schema message before the first batch.

        Raises:
            SchemaError: of a newer version than this reader knows.
        """
        if self.schema is None:
            try:
                schema = pa.ipc.read_schema(pa.py_buffer(self.bytes(0, offset)))
            except (pa.ArrowException, EOFError, OSError) as error:
                raise ranges.failure(self.path, 0, offset, f"no schema message: {error}") from error
            check_version(self.path, schema)
            self.schema = schema
        return self.schema


def check_version(path: Path, schema: pa.Schema) -> None:
    """Raise SchemaError where the schema is of a newer version than this reader knows, or of no version."""
    text = (schema.metadata or {}).get(VERSION_KEY.encode(), b"?").decode("ascii", "replace")
    if not text.isdigit():
        raise SchemaError(f"{path}: metadata {VERSION_KEY} is {text!r}, not a number: not a shard of this program")
    if int(text) > SCHEMA_VERSION:
        raise SchemaError(
            f"{path}: shard schema version {text}, this reader knows {SCHEMA_VERSION}: read it with a newer rollmill",
            file_version=int(text),
            known_version=SCHEMA_VERSION,
        )


class MappedBatches:
    """Reads committed ranges; keeps maps open and the last batches decoded. Not shared between threads."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._files: dict[Path, _File] = {}
        self._batches: OrderedDict[tuple[str, int], tuple[pa.RecordBatch, dict[str, tuple[int, int]]]] = OrderedDict()

    def read(self, shard: str, offset: int, length: int, crc32: int, rollout_id: str) -> Place:
        """The batch in this range, and the rollout's first row and number of rows in it.

        Raises:
            NotYetError: the range is absent, short or of another crc.
            SchemaError: the file is of a newer schema.
            ShardError: the range is intact and does not hold the rollout.
        """
        key = (shard, offset)
        found = self._batches.get(key)
        if found is None:
            batch = self._decode(self._layout.resolve(shard), offset, length, crc32)
            found = self._batches[key] = (batch, by_rollout(batch))
            if len(self._batches) > _CACHED_BATCHES:
                self._batches.popitem(last=False)
        else:
            self._batches.move_to_end(key)
        batch, rollouts = found
        if rollout_id not in rollouts:
            raise ShardError(
                f"{self._layout.root / shard}: the batch at {offset}+{length} has no rollout {rollout_id!r}: "
                "the index is wrong"
            )
        return batch, *rollouts[rollout_id]

    def close(self) -> None:
        """Let go of all maps; those that rows still use go with their rows."""
        self._batches.clear()
        self._files.clear()

    def _decode(self, path: Path, offset: int, length: int, crc32: int) -> pa.RecordBatch:
        file = self._files.setdefault(path, _File(path))
        data = file.bytes(offset, length)
        try:
            if offset not in file.checked:
                ranges.check(path, offset, length, crc32, data)
            schema = file.read_schema(offset)
        except ranges.NotYetError:
            file.map = None  # the next try opens anew, which is when a network filesystem looks again
            raise
        file.checked.add(offset)
        try:
            message = pa.ipc.read_message(pa.py_buffer(data))
            return pa.ipc.read_record_batch(message, schema)
        except (pa.ArrowException, EOFError, OSError) as error:
            raise ShardError(f"{path}: bytes {offset}+{length} are no record batch of its schema: {error}") from error


def by_rollout(batch: pa.RecordBatch) -> dict[str, tuple[int, int]]:
    """Each rollout's first row and number of rows in a batch; its chains lie side by side."""
    ids = batch.column("rollout_id").to_pylist()
    places: dict[str, tuple[int, int]] = {}
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[start]:
            places[ids[start]] = (start, end - start)
            start = end
    return places
