"""Public bugs of the field about readers: files of a newer version are refused by name, and never half read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from stages.errors import SchemaError
from stages.shards import ShardReader
from stages.shards.schema import SCHEMA
from tests.unit.stages_files.samples import make_layout, make_row, publish, rows_line, write_rows


def test_b30_a_reader_refuses_a_newer_schema_by_name(tmp_path: Path) -> None:
    layout, row = make_layout(tmp_path), make_row(0)
    (place,) = write_rows(layout, [row])
    newer = bytes(SCHEMA.with_metadata({"rollmill.schema_version": "2"}).serialize())
    path = layout.resolve(place.path)
    data = path.read_bytes()
    path.write_bytes(newer + data[place.offset :])
    publish(layout, [rows_line(1, row, msgspec.structs.replace(place, offset=len(newer)))])
    with pytest.raises(SchemaError, match=r"\.arrows: shard schema version 2, this reader knows 1.*newer rollmill"):
        list(ShardReader(layout.root))


def test_b30_the_index_of_a_newer_program_is_refused_by_name(tmp_path: Path) -> None:
    layout, row = make_layout(tmp_path), make_row(0)
    (place,) = write_rows(layout, [row])
    publish(layout, [rows_line(1, row, place)])
    (part,) = layout.index.glob("*.jsonl")
    part.write_bytes(part.read_bytes().replace(b'"v":1', b'"v":2', 1))
    with pytest.raises(SchemaError, match=r"\.jsonl line 1: index version 2, known is 1: .*newer rollmill"):
        list(ShardReader(layout.root))
