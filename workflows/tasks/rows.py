"""Rows out of a JSONL or Parquet file: a line that is no row becomes one that fails alone, with its reason."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from stages.errors import RolloutError
from stages.protocols import Environment, Row
from workflows.errors import TaskDataError

BROKEN: Final = "_broken"
"""The column of a row that stands for a line that is none: the reason."""

Check = Callable[[Any, int], "dict[str, Any] | str | None"]
"""From a line's value and its number to its row, with a `task_id`, or what is wrong with it; None: another task's."""


def read_rows(path: Path, check: Check) -> Iterator[dict[str, Any]]:
    """The file's rows in order; empty lines and another task's are passed over. X.parquet is a Parquet file.

    Raises:
        TaskDataError: the file cannot be read.
    """
    seen: dict[str, int] = {}
    for number, line in _lines(path):
        row = _read_row(line, number, check) if isinstance(line, bytes) else check(line, number)
        if row is None:
            continue
        if not isinstance(row, str):
            first = seen.setdefault(row["task_id"], number)
            if first != number:
                row = f"task_id {row['task_id']!r} stands on line {first} already"
        yield _broken(path, number, row, seen) if isinstance(row, str) else row


def _lines(path: Path) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    """Each line that is not empty, or each row of a Parquet file, with its number from 1."""
    try:
        if path.suffix == ".parquet":
            from stages.shards.foreign import plain_rows  # pyarrow takes a while to load, and JSONL needs none of it

            yield from enumerate(plain_rows(path), start=1)
            return
        lines = path.read_bytes().split(b"\n")
    except (OSError, ValueError) as error:
        raise TaskDataError(f"task.path: {path}: cannot be read: {error}") from error
    yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _read_row(line: bytes, number: int, check: Check) -> dict[str, Any] | str | None:
    try:
        value = msgspec.json.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason} at byte {error.start}"
    except (msgspec.DecodeError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(value, dict):
        return f"expected an object, got {type(value).__name__}"
    return check(value, number)


def _broken(path: Path, number: int, wrong: str, seen: dict[str, int]) -> dict[str, Any]:
    task_id = f"line-{number}"
    while seen.setdefault(task_id, number) != number:
        task_id += "-broken"
    return {"task_id": task_id, BROKEN: f"{path}:{number}: {wrong}"}


def wrong_texts(row: Mapping[str, Any], columns: tuple[str, ...]) -> str:
    """What is wrong with columns that must be texts; empty where nothing is."""
    for column in columns:
        if column not in row:
            return f"{column} is missing"
        if not isinstance(row[column], str):
            return f"{column} must be a string, got {type(row[column]).__name__}"
    return ""


def check_limit(limit: int | None) -> None:
    """Refuse a number of rows that is none.

    Raises:
        TaskDataError: it is below 0.
    """
    if limit is not None and limit < 0:
        raise TaskDataError(f"task.limit: got {limit}; allowed: 0 or more")


def check_positive(**options: float) -> None:
    """Refuse options of a task that must be above 0.

    Raises:
        TaskDataError: the first that is not.
    """
    for name, value in options.items():
        if not value > 0:
            raise TaskDataError(f"task.options.{name}: got {value}; allowed: above 0")


def broken_environment(row: Row) -> Environment | None:
    """The environment of a broken row, which is its own, so that it fails alone; None where the row is whole."""
    if BROKEN not in row:
        return None
    return Environment(setup_key="broken-" + hashlib.sha256(str(row[BROKEN]).encode()).hexdigest()[:16])


def refuse_broken(row: Row) -> None:
    """Fail a broken row where its environment would be prepared.

    Raises:
        RolloutError: it is broken; final, since it will be broken at the next attempt too.
    """
    if BROKEN in row:
        raise RolloutError(str(row[BROKEN]), final=True)
