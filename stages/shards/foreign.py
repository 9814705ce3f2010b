"""Rows of a Parquet file that somebody else wrote, as plain Python values: data sets that tasks read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

_AT_ONCE: Final = 256
"""Rows that are Python values at the same time; tests of a programming problem have megabytes."""


def plain_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The file's rows in order: column name to text, number, bytes, list, dict, date or None.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no Parquet file, or it is damaged.
    """
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_AT_ONCE):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(str(error)) from error
