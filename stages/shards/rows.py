"""What a reader gives out: a rollout with its columns, converted to Python values only when they are asked for."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from stages.shards.index import GroupLine, RowsLine

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
CHAIN_COLUMNS = (
    "chain", "prompt_length", "token_ids", "loss_mask", "logprobs", "policy_versions", "min_policy_version",
    "routed_experts", "turns",
)  # fmt: skip
"""Columns that differ from chain to chain of a rollout; all others are the rollout's own."""


def _value(column: pa.Array, number: int) -> Any:
    """One cell as a Python value: maps as dicts, timestamps in UTC without a time zone database."""
    cell = column[number]
    if not cell.is_valid:
        return None
    if pa.types.is_map(column.type):
        return dict(cell.as_py())
    if pa.types.is_timestamp(column.type):
        return _EPOCH + timedelta(microseconds=cell.value)
    return cell.as_py()


class ChainView(Mapping[str, Any]):
    """One chain's columns, by name; `array` gives a list column without copying."""

    def __init__(self, batch: pa.RecordBatch, number: int) -> None:
        self._batch = batch
        self._number = number

    def __getitem__(self, name: str) -> Any:
        if name not in self._batch.schema.names:
            raise KeyError(name)
        return _value(self._batch.column(name), self._number)

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.schema.names)

    def __len__(self) -> int:
        return int(self._batch.num_columns)

    def array(self, name: str) -> pa.Array:
        """A list column's values as an Arrow array on the mapped file, e.g. `array("token_ids").to_numpy()`."""
        return self._batch.column(name)[self._number].values


class ShardRow(Mapping[str, Any]):
    """One committed rollout: `line` from the index, `batch` with one Arrow row a chain.

    As a mapping it has the columns of its first chain. A rollout that never reached a shard has no batch and no
    chains; its mapping holds what the index line says.
    """

    __slots__ = ("_count", "_start", "_whole", "line")

    def __init__(self, line: RowsLine, whole: pa.RecordBatch | None, start: int = 0, count: int = 0) -> None:
        self.line = line
        self._whole, self._start, self._count = whole, start, count

    @property
    def batch(self) -> pa.RecordBatch | None:
        """The rollout's own rows, sliced without copying from the batch that was committed."""
        return None if self._whole is None else self._whole.slice(self._start, self._count)

    @property
    def seq(self) -> int:
        """Where to resume after this rollout."""
        return self.line.seq

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return self.line.rollout_id

    @property
    def chains(self) -> tuple[ChainView, ...]:
        """Each token stream of the rollout, in order."""
        return tuple(ChainView(self._whole, self._start + number) for number in range(self._count))

    def to_pydict(self) -> dict[str, Any]:
        """All columns of the first chain as Python values."""
        return dict(self)

    def __getitem__(self, name: str) -> Any:
        if self._whole is None:
            if name not in _INDEX_COLUMNS:
                raise KeyError(name)
            return getattr(self.line, name)
        return ChainView(self._whole, self._start)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_INDEX_COLUMNS if self._whole is None else self._whole.schema.names)

    def __len__(self) -> int:
        return len(_INDEX_COLUMNS) if self._whole is None else int(self._whole.num_columns)


_INDEX_COLUMNS = (
    "rollout_id", "group_id", "task_id", "tag", "status", "failure_class", "reward", "mask_sample",
    "min_policy_version",
)  # fmt: skip


@dataclass(frozen=True)
class ShardGroup:
    """One closed group and its rollouts in the order of the group line; those not published by then are not in it."""

    line: GroupLine
    rows: tuple[ShardRow, ...]


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return value


def chain_to_json(chain: Mapping[str, Any]) -> dict[str, Any]:
    """One Arrow row as JSON values: lists plain, times in ISO 8601, bytes in base64."""
    return {name: _plain(value) for name, value in chain.items()}


def row_to_json(row: ShardRow) -> dict[str, Any]:
    """A rollout as one JSON object: the columns of its first chain, and `chains` when it has more than one.

    `chains` then holds the chain columns of every chain, the first one's too.
    """
    result = chain_to_json(row)
    chains = row.chains
    if len(chains) > 1:
        result["chains"] = [{name: _plain(chain[name]) for name in CHAIN_COLUMNS} for chain in chains]
    return result
