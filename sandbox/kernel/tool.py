"""The Python tool: one kernel a sandbox, started at first use, and started anew whenever it was lost."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox.errors import PythonUnavailable, SpawnerError
from sandbox.kernel import program
from sandbox.kernel.layer import KernelLayer
from sandbox.protocols import CellResult, SandboxLimits
from sandbox.spawn_client import SpawnClient
from sandbox.started import Joined

if TYPE_CHECKING:
    from sandbox.kernel.process import KernelProcess

_PROGRAM = Path(program.__file__).read_text()
_INTERRUPT_GRACE_S = 2.0
"""At least: a kernel's first traceback is a second's work on a loaded node."""
_MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Place:
    """Where a kernel is started.

    Args:
        pid: the sandbox's outermost process; None where nothing is isolated.
        env: its environment; PATH says which python3 it is.
        cwd: its directory.
        directory: the sandbox's own on this machine.
    """

    pid: int | None
    env: Mapping[str, str]
    cwd: str
    directory: str


class KernelPython:
    """See `Python`; belongs to one event loop.

    Args:
        spawner: starts and kills kernels.
        place: starts the sandbox where that is not done, and says where.
        layer: our ipykernel, for images that have none.
        limits: output bound, graces, deadline of a start.
        resumed: the sandbox goes on from a checkpoint, which holds no kernel: the first cell says so.
    """

    def __init__(
        self, spawner: SpawnClient, place: Callable[[], Awaitable[Place]], layer: KernelLayer, limits: SandboxLimits,
        *, resumed: bool = False,
    ) -> None:  # fmt: skip
        self._spawner, self._place, self._layer, self._limits = spawner, place, layer, limits
        self._lock = asyncio.Lock()
        self._kernel: KernelProcess | None = None
        self._lost = resumed  # and no result has said so yet

    async def run(self, code: str, timeout_s: float = 30.0) -> CellResult:
        """See `Python.run`."""
        async with self._lock:
            started = time.perf_counter()
            kernel = await self._ready()
            kernel.begin(code.encode("utf-8", "replace").decode())
            in_time = await kernel.ended(timeout_s)
            timed_out = not in_time and not kernel.lost.done()
            if timed_out:
                await self._interrupt(kernel)
            output, error = kernel.take(), None
            if kernel.lost.done():
                error = f"the Python kernel was lost: {kernel.lost.result()}"
                await self._drop()
            elif timed_out:
                error = output.error or "the cell was interrupted"
            restarted, self._lost = self._lost, False
            return CellResult(
                output.text(), error or output.error, tuple(output.images), time.perf_counter() - started,
                output.truncated, timed_out, restarted,
            )  # fmt: skip

    async def restart(self) -> None:
        """See `Python.restart`."""
        async with self._lock:
            await self._drop()
            await self._ready()
            self._lost = False

    async def kill(self) -> None:
        """End the kernel, also while a cell runs; idempotent."""
        if self._kernel is not None:
            await self._kernel.end(self._limits.start_s)

    async def _ready(self) -> KernelProcess:
        """A kernel that waits for a cell."""
        kernel = self._kernel
        if kernel is not None and kernel.pending:  # its caller was cancelled
            await self._interrupt(kernel)
            kernel.take()
        if kernel is not None and kernel.lost.done():
            await self._drop()
        if self._kernel is None:
            self._kernel = await self._start()
        return self._kernel

    async def _start(self) -> KernelProcess:
        process = await asyncio.to_thread(importlib.import_module, "sandbox.kernel.process")  # brings jupyter_client
        wire = process.Wire()
        share = await self._layer.path()
        try:
            joined = await self._launch(share, wire.key)
        except SpawnerError:  # the shell was lost just then, and its namespaces with it
            joined = await self._launch(share, wire.key)
        kernel: KernelProcess = process.KernelProcess(joined, wire, self._spawner, self._limits.output_bytes)
        try:
            async with asyncio.timeout(self._limits.start_s):
                if await kernel.ready():
                    kernel.take()
                    return kernel
            why = kernel.last_words or kernel.lost.result()
        except TimeoutError:
            why = f"it did not answer within {self._limits.start_s:g} s; {kernel.last_words}".removesuffix("; ")
        except BaseException:  # whatever kept it from answering, the kernel goes; raised again
            await kernel.end(self._limits.start_s)
            raise
        await kernel.end(self._limits.start_s)
        raise PythonUnavailable(f"no Python kernel starts in this sandbox: {why}", boundary="python")

    async def _launch(self, share: Path | None, key: str) -> Joined:
        place = await self._place()
        inside = f"/proc/self/fd/{program.SITE_FD}"
        seen = "-" if share is None else str(share) if place.pid is None else inside
        return await self._spawner.join(
            place.pid, ("python3", "-B", "-c", program.START, _PROGRAM, seen, _MINOR),
            env={**place.env, program.KEY: key}, cwd=place.cwd,
            directory=place.directory, share=None if share is None else str(share), timeout_s=self._limits.start_s,
        )  # fmt: skip

    async def _interrupt(self, kernel: KernelProcess) -> None:
        """Interrupt the cell; a kernel that does not obey is killed."""
        if kernel.busy:
            kernel.interrupt()
            if not await kernel.ended(max(self._limits.interrupt_grace_s, _INTERRUPT_GRACE_S)):
                await kernel.end(self._limits.start_s, "the cell did not stop at an interrupt, so it was killed")

    async def _drop(self) -> None:
        if self._kernel is not None:
            kernel, self._kernel = self._kernel, None
            self._lost = True
            await kernel.end(self._limits.start_s)
