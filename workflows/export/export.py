"""Exports a run's committed rollouts to one file in a format of choice, which appears whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages import sharedfs
from stages.shards import ShardGroup, ShardReader, ShardRow
from workflows.errors import ExportError
from workflows.export import nemo_gym, prime_rl, skyrl, slime, trl, verl
from workflows.export.jsonl import write_jsonl, write_lines
from workflows.export.parquet import write_parquet
from workflows.export.samples import counts

ROWS: dict[str, Callable[[Iterable[ShardRow], sharedfs.AppendFile], None]] = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
}
"""Formats of ours: every chain of every row."""
GROUPS: dict[str, Callable[[ShardGroup, int], list[dict[str, Any]]]] = {
    "nemo-gym": nemo_gym.to_lines,
    "verl": verl.to_lines,
    "slime": slime.to_lines,
    "prime-rl": prime_rl.to_lines,
    "skyrl": skyrl.to_lines,
    "trl": trl.to_lines,
}
"""Formats of trainers, JSON lines of a closed group's counting rollouts; given are the group and its number from 0."""
FORMATS = (*ROWS, *GROUPS)
SIDECARS: dict[str, Callable[[ShardGroup, int], list[dict[str, Any]]]] = {"nemo-gym": nemo_gym.to_failures}
"""What of a group goes into a file beside the output, `<name>_failures.jsonl`, in formats that keep failures apart."""


@dataclass(frozen=True)
class ExportCount:
    """What an export wrote: rollouts, their chains, and what it left out.

    Left out are rollouts that never reached a shard and, in trainers' formats, those that no trainer may learn from.
    """

    rollouts: int
    chains: int
    without_row: int
    bytes: int
    masked: int = 0


class _Counter:
    """Counts the rollouts that pass to a writer."""

    def __init__(self) -> None:
        self.rollouts = 0
        self.chains = 0
        self.without_row = 0
        self.masked = 0

    def rows(self, rows: Iterable[ShardRow]) -> Iterator[ShardRow]:
        for row in rows:
            if self._there(row):
                self._count(row)
                yield row

    def groups(self, groups: Iterable[ShardGroup]) -> Iterator[ShardGroup]:
        for group in groups:
            for row in group.rows:
                if self._there(row):
                    if counts(row):
                        self._count(row)
                    else:
                        self.masked += 1
            yield group

    def _there(self, row: ShardRow) -> bool:
        self.without_row += not row.chains
        return bool(row.chains)

    def _count(self, row: ShardRow) -> None:
        self.rollouts += 1
        self.chains += len(row.chains)


def check_format(name: str) -> None:
    """Raise ExportError, naming the formats that exist, unless `name` is one of them."""
    if name not in FORMATS:
        raise ExportError(f"no export format {name!r}: choose one of {', '.join(FORMATS)}")


def _lines(format_: str, groups: Iterable[ShardGroup], failures: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The format's lines of all groups; what its sidecar takes is added to `failures`."""
    aside = SIDECARS.get(format_)
    for number, group in enumerate(groups):
        yield from GROUPS[format_](group, number)
        if aside is not None:
            failures += aside(group, number)


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
    counter = _Counter()
    with ShardReader(run_dir, tag=tag) as reader:
        try:
            with sharedfs.atomic_file(output) as file:
                if format_ in ROWS:
                    ROWS[format_](counter.rows(reader), file)
                else:
                    failures: list[dict[str, Any]] = []
                    write_lines(_lines(format_, counter.groups(reader.groups()), failures), file)
                    if format_ in SIDECARS:
                        with sharedfs.atomic_file(output.with_name(f"{output.stem}_failures.jsonl")) as beside:
                            write_lines(failures, beside)
                size = file.length
        except OSError as error:
            raise ExportError(f"{output}: cannot be written: {error.strerror}") from error
    return ExportCount(counter.rollouts, counter.chains, counter.without_row, size, counter.masked)
