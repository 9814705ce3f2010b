"""control/: requests to a run by file, for login nodes that cannot reach its router."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

import msgspec

from stages import sharedfs
from stages.errors import ManifestError
from stages.layout import RunLayout

Request = Literal["drain", "cancel"]


def request(run_dir: Path, name: Request) -> Path:
    """Leave a request; the run takes it up within seconds.

    Raises:
        ManifestError: no run directory, or it cannot be written.
    """
    layout = RunLayout(run_dir)
    path = layout.control_request(name)
    body = {"request": name, "at": time.time(), "pid": os.getpid()}
    try:
        sharedfs.write_atomic(path, msgspec.json.encode(body))
    except OSError as error:
        raise ManifestError(f"{path} cannot be written: {error.strerror}; is {run_dir} a run directory?") from error
    return path


def pending(layout: RunLayout, name: Request) -> bool:
    """Whether the request is there."""
    return sharedfs.exists(layout.control_request(name))


def clear(layout: RunLayout) -> None:
    """Forget the requests of an earlier start."""
    for name in ("drain", "cancel"):
        sharedfs.unlink(layout.control_request(name))
