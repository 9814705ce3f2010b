"""Shards for their readers: this package imports with pyarrow alone; its writing side is imported by module."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stages.shards.index import GroupLine, RowsLine

if TYPE_CHECKING:
    from stages.shards.reader import ShardReader
    from stages.shards.rows import ShardGroup, ShardRow, row_to_json

__all__ = ["GroupLine", "RowsLine", "ShardGroup", "ShardReader", "ShardRow", "row_to_json"]

_LATER = {"ShardReader": "reader", "ShardGroup": "rows", "ShardRow": "rows", "row_to_json": "rows"}
"""Names whose modules bring pyarrow along: the router, which needs the index alone, starts half a second sooner."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
