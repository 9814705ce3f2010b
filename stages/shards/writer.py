"""Shards: a schema message, then one encapsulated record batch a group commit, in rotated append-only files.

The range of a batch is exactly its message: 8-byte aligned, uncompressed, without dictionaries, so that it can be read
with nothing but the schema.
"""

from __future__ import annotations

from collections.abc import Sequence

from stages import sharedfs
from stages.errors import ShardError
from stages.groupcommit import ROTATE_BYTES, Block, GroupCommit, Policy
from stages.layout import RunLayout
from stages.shards import schema, version
from stages.trajectory import Row, RowRange

_TOKEN_BYTES = 9
_ROW_BYTES = 2048


def write_schema(layout: RunLayout) -> None:
    """Leave the schema message alone in shards/, for readers in other languages."""
    sharedfs.write_atomic(layout.schema(version.SCHEMA_VERSION), schema.schema_message())


def _weight(row: Row) -> int:
    tokens = sum(chain.length for chain in row.trajectory.chains)
    text = sum(len(message.content) for message in row.trajectory.messages)
    return _TOKEN_BYTES * tokens + text + _ROW_BYTES


class ShardWriter:
    """One EVAL worker incarnation's shards: an async context manager whose `append` many callers use at once."""

    def __init__(
        self,
        layout: RunLayout,
        member: str,
        *,
        messages: bool = True,
        deadline_s: float = 120.0,
        rotate_bytes: int = ROTATE_BYTES,
    ) -> None:
        self._messages = messages
        policy = Policy[Row](
            path=lambda number: layout.shard(member, number),
            pack=self._pack,
            weight=_weight,
            # Two attempts of one rollout never share a batch: readers find a rollout's chains in it by its id.
            key=lambda row: row.rollout_id,
            header=schema.schema_message(),
            rotate_bytes=rotate_bytes,
        )
        self._commits = GroupCommit(layout, policy, deadline_s=deadline_s)

    async def append(self, row: Row) -> RowRange:
        """Write the row and return the range of the batch that holds it, once that is durable.

        Raises:
            ShardError: the row is inconsistent, or it could not be made durable within the deadline.
        """
        return await self._commits.append(row)

    def _pack(self, rows: Sequence[Row]) -> list[Block]:
        data = memoryview(schema.rows_to_batch(rows, messages=self._messages).serialize())
        if len(data) % 8:
            raise ShardError(f"a record batch of {len(data)} bytes is not 8-byte aligned")
        return [Block(data, len(rows))]

    async def __aenter__(self) -> ShardWriter:
        await self._commits.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._commits.__aexit__(*details)
