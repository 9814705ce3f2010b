"""Shards for their readers: this package imports with pyarrow alone; its writing side is imported by module."""

from stages.shards.index import GroupLine, RowsLine
from stages.shards.reader import ShardReader
from stages.shards.rows import ShardGroup, ShardRow, row_to_json

__all__ = ["GroupLine", "RowsLine", "ShardGroup", "ShardReader", "ShardRow", "row_to_json"]
