"""control/: requests to a run by file, for login nodes that cannot reach its router."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from stages import sharedfs
from stages.errors import ManifestError
from stages.layout import RunLayout

TOLD_BY_SLURM: Final = "a signal: the allocation ends soon"
"""Reason of a drain after which the run goes on by itself; after a person's it waits for `resume`."""

Request = Literal["drain", "cancel", "fail"]
"""`fail` is a job's leader telling the driver that a component that nothing can do without is gone."""


def request(run_dir: Path, name: Request, message: str = "") -> Path:
    """Leave a request, with its reason; the run takes it up within seconds.

    Raises:
        ManifestError: no run directory, or it cannot be written.
    """
    layout = RunLayout(run_dir)
    path = layout.control_request(name)
    body = {"request": name, "at": time.time(), "pid": os.getpid(), "message": message}
    try:
        sharedfs.write_atomic(path, msgspec.json.encode(body))
    except OSError as error:
        raise ManifestError(f"{path} cannot be written: {error.strerror}; is {run_dir} a run directory?") from error
    return path


def pending(layout: RunLayout, name: Request) -> bool:
    """Whether the request is there."""
    return sharedfs.exists(layout.control_request(name))


def message(layout: RunLayout, name: Request) -> str | None:
    """The reason that a request gives; None where there is no such request."""
    try:
        return str(msgspec.json.decode(sharedfs.read_bytes(layout.control_request(name))).get("message", ""))
    except FileNotFoundError:
        return None


def clear(layout: RunLayout, names: Sequence[Request] = ("drain", "cancel", "fail")) -> None:
    """Forget requests of an earlier start: all of them where a person starts the run, the drain where it goes on."""
    for name in names:
        sharedfs.unlink(layout.control_request(name))
