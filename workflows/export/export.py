"""Exports a run's committed rollouts to one file in a format of choice, which appears whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stages import sharedfs
from stages.shards import ShardReader, ShardRow
from workflows.errors import ExportError
from workflows.export.jsonl import write_jsonl
from workflows.export.parquet import write_parquet

FORMATS: dict[str, Callable[[Iterable[ShardRow], sharedfs.AppendFile], None]] = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
}
NOT_BUILT_YET = ("nemo-gym", "verl", "slime", "prime-rl", "skyrl", "trl")


@dataclass(frozen=True)
class ExportCount:
    """What an export wrote: rollouts, their chains, and rollouts left out because they never reached a shard."""

    rollouts: int
    chains: int
    without_row: int
    bytes: int


class _Counter:
    """Counts the rollouts that pass to a writer."""

    def __init__(self, rows: Iterable[ShardRow]) -> None:
        self._rows = rows
        self.rollouts = 0
        self.chains = 0
        self.without_row = 0

    def __iter__(self) -> Iterator[ShardRow]:
        for row in self._rows:
            if row.batch is None:
                self.without_row += 1
                continue
            self.rollouts += 1
            self.chains += row.batch.num_rows
            yield row


def check_format(name: str) -> None:
    """Raise ExportError, naming the formats that exist, unless `name` is one of them."""
    if name in FORMATS:
        return
    known = ", ".join(FORMATS)
    if name in NOT_BUILT_YET:
        raise ExportError(f"export format {name!r} is not built yet: choose one of {known}")
    raise ExportError(f"no export format {name!r}: choose one of {known} (not built yet: {', '.join(NOT_BUILT_YET)})")


def export(run_dir: Path, format_: str, output: Path, *, tag: str | None = None) -> ExportCount:
    """Write what is committed now to `output`, replacing a file of that name.

    Raises:
        ExportError: no such format, no run directory, or the output cannot be written.
        ShardError: a committed row cannot be read.
    """
    check_format(format_)
    if not (run_dir / "index").is_dir():
        raise ExportError(f"{run_dir}: no index/ there: give the run directory of a run that has started")
    output = output.absolute()
    if output.is_dir() or not output.parent.is_dir():
        raise ExportError(f"{output}: give a file name in a directory that exists")
    with ShardReader(run_dir, tag=tag) as reader:
        rows = _Counter(reader)
        try:
            with sharedfs.atomic_file(output) as file:
                FORMATS[format_](rows, file)
                size = file.length
        except OSError as error:
            raise ExportError(f"{output}: cannot be written: {error.strerror}") from error
    return ExportCount(rows.rollouts, rows.chains, rows.without_row, size)
