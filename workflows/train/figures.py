"""Draws the curves of training runs into one picture: `python -P -m workflows.train.figures OUT.png NAME=RUN_DIR...`.

It reads what the runs left (train/state.json), so it also works while they go on, and needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from stages import sharedfs
from workflows.errors import TrainError
from workflows.train import report
from workflows.train.plots import picture
from workflows.train.records import Places, Record, read_state


def main(argv: Sequence[str] | None = None) -> int:
    """Write the picture and print each run's report; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -P -m workflows.train.figures", description=main.__doc__)
    parser.add_argument("out", type=Path, help="the PNG to write")
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN_DIR")
    args = parser.parse_args(argv)
    try:
        runs = [_records(text) for text in args.runs]
        drawn = picture(runs, ", ".join(name for name, _ in runs))
        if drawn is None:
            raise TrainError("a picture needs matplotlib: uv pip install 'rollmill[train]'")
    except TrainError as error:
        sys.stderr.write(f"rollmill: {error}\n")
        return 1
    sharedfs.write_atomic(args.out, drawn)
    for name, records in runs:
        sys.stdout.write(f"{name}\n{report.lines(report.summary(records))}")
    return 0


def _records(text: str) -> tuple[str, Sequence[Record]]:
    name, found, directory = text.partition("=")
    if not found:
        raise TrainError(f"got {text!r}; wanted NAME=RUN_DIR")
    state = read_state(Places(Path(directory)))
    if state is None:
        raise TrainError(f"{directory}: nothing was trained there: it has no train/state.json")
    return name, state.records


if __name__ == "__main__":
    sys.exit(main())
