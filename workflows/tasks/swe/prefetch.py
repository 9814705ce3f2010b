"""Fetches the wheels of a whole data file ahead, on a machine that has a network: `rollmill images prefetch`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sandbox.bashtext import BASE_ENV
from sandbox.protocols import SandboxBackend, SandboxSpec
from workflows.tasks.rows import BROKEN
from workflows.tasks.swe import setting
from workflows.tasks.swe.task import SweTask
from workflows.wheels.cache import WheelCache
from workflows.wheels.errors import WheelError
from workflows.wheels.fetch import own_environ
from workflows.wheels.target import PROBE, PythonTarget, parse


class Prefetched(msgspec.Struct, frozen=True):
    """One row: how many wheels it needs, or why they cannot be had."""

    task_id: str
    wheels: int = 0
    error: str = ""


def prefetch(path: Path, wheels: Path, target: PythonTarget) -> Iterator[Prefetched]:
    """Lock and fetch the requirements of every row; what is there already is not fetched again. Blocks.

    Args:
        path: the data file of task=swe.
        wheels: the store's directory of wheels.
        target: the Python of the image that the rows will be prepared in.

    Raises:
        TaskDataError: the file cannot be read; a row that cannot be fetched is one of the answers.
    """
    cache = WheelCache(wheels, own_environ())
    for row in SweTask(str(path)).rows():
        if BROKEN in row:
            yield Prefetched(row["task_id"], error=row[BROKEN])
            continue
        try:
            yield Prefetched(row["task_id"], wheels=len(cache.lock(setting.requirements(row), target).wheels))
        except WheelError as error:
            yield Prefetched(row["task_id"], error=str(error))


def host_target(python: str = "python3") -> PythonTarget:
    """The Python of image=host: this machine's, found as a sandbox finds it.

    Raises:
        WheelError: there is none, or it does not say what it is.
    """
    found = shutil.which(python, path=BASE_ENV["PATH"])
    if found is None:
        raise WheelError(f"no {python} in {BASE_ENV['PATH']}: sandboxes of image=host would have none either")
    done = subprocess.run([found, "-I", "-S", "-c", PROBE], capture_output=True, check=False, env={}, timeout=60)
    return parse(done.stdout)


async def image_target(backend: SandboxBackend, spec: SandboxSpec, python: str = "python3") -> PythonTarget:
    """The Python of an image, asked in a sandbox of it.

    Raises:
        WheelError: there is none, or it does not say what it is.
        SandboxError: no sandbox could be started on this machine.
    """
    async with backend.create(spec) as sandbox:
        return await setting.ask(sandbox, python)
