"""Exports read back: every row, every column, whole or not at all."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from stages.errors import ShardError
from stages.layout import RunLayout
from stages.shards import ShardReader
from stages.shards.schema import SCHEMA
from tests.unit.stages_files.samples import make_chain, make_layout, make_row, publish, rows_line, write_rows
from workflows.errors import ExportError
from workflows.export import export as module
from workflows.export.export import ExportCount, export


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """Five rollouts with 1, 1, 2, 1 and 1 rows, the second without chains, and one that never reached a shard."""
    layout = make_layout(tmp_path)
    chains = [make_chain()]
    streams = [chains, [], chains * 2, chains, chains]
    written = [make_row(n, own, tag="" if n else "a") for n, own in enumerate(streams)]
    places = [*write_rows(layout, written), None]
    written.append(make_row(5))
    publish(layout, [rows_line(n, row, place) for n, (row, place) in enumerate(zip(written, places, strict=True), 1)])
    return layout


def test_jsonl_has_a_line_a_chain_with_all_columns(layout: RunLayout, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    counted = export(layout.root, "jsonl", output)
    assert counted == ExportCount(rollouts=5, chains=6, without_row=1, bytes=output.stat().st_size)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["rollout_id"], line["chain"]) for line in lines] == [
        ("r0", 0), ("r1", 0), ("r2", 0), ("r2", 1), ("r3", 0), ("r4", 0),
    ]  # fmt: skip
    assert all(list(line) == SCHEMA.names for line in lines)
    assert lines[0]["token_ids"] == make_chain().token_ids
    assert lines[0]["reward_parts"] == {"answer": 1.0, "format": 0.5}
    assert lines[0]["turns"][0]["finish_reason"] == "stop"
    assert lines[1]["token_ids"] == []


def test_parquet_has_the_same_rows_with_the_same_types(layout: RunLayout, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    counted = export(layout.root, "parquet", output)
    assert counted == ExportCount(rollouts=5, chains=6, without_row=1, bytes=output.stat().st_size)
    table = pq.read_table(output)
    assert table.schema.equals(SCHEMA)
    assert table.schema.metadata == SCHEMA.metadata
    assert table["rollout_id"].to_pylist() == ["r0", "r1", "r2", "r2", "r3", "r4"]
    assert table["token_ids"].to_pylist()[0] == make_chain().token_ids
    assert pq.ParquetFile(output).metadata.row_group(0).column(0).compression == "ZSTD"


def test_one_tag(layout: RunLayout, tmp_path: Path) -> None:
    assert export(layout.root, "jsonl", tmp_path / "a", tag="a").rollouts == 1


def test_an_unknown_format_names_those_there_are(layout: RunLayout, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"'csv': choose one of jsonl, parquet, nemo-gym, verl"):
        export(layout.root, "csv", tmp_path / "x")


def test_a_directory_that_is_no_run_and_an_output_that_cannot_be(layout: RunLayout, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no index/"):
        export(tmp_path / "nothing", "jsonl", tmp_path / "x")
    for output in (tmp_path, tmp_path / "missing" / "x"):
        with pytest.raises(ExportError, match="in a directory that exists"):
            export(layout.root, "jsonl", output)


@pytest.mark.parametrize("name", ["jsonl", "parquet"])
def test_a_failed_export_leaves_the_old_output(layout: RunLayout, tmp_path: Path, name: str) -> None:
    output = tmp_path / "out"
    output.write_text("old")
    shard = layout.shard("eval-1-3f9a", 0)
    shard.write_bytes(shard.read_bytes()[:-8] + b"damaged!")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ShardError, match="crc32"):
        patch.setattr(module, "ShardReader", partial(ShardReader, visibility_s=0))
        export(layout.root, name, output)
    assert output.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]
