"""Our ipykernel for images that have none: laid out once a worker, beside its sandboxes, when the first one asks."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from sandbox.errors import SandboxError
from sandbox.execution import Running
from sandbox.kernel.distributions import DONE, ROOT
from sandbox.spawn_client import SpawnClient

_MAIN = "import sys; sys.path.append(sys.argv.pop(1)); from sandbox.kernel.distributions import main; main()"
_DEADLINE_S = 120.0
"""Two seconds of work on an idle core: 900 files to link, 400 modules to compile."""


class KernelLayer:
    """Belongs to one event loop.

    Args:
        spawner: runs the program that lays it out.
        home: the worker's private directory.
    """

    def __init__(self, spawner: SpawnClient, home: Callable[[], Awaitable[Path]]) -> None:
        self._spawner, self._home = spawner, home
        self._lock = asyncio.Lock()
        self._tries = 0
        self._path: Path | None = None

    async def path(self) -> Path | None:
        """The directory; None where ipykernel is not installed here.

        Raises:
            SandboxError: it cannot be laid out.
        """
        async with self._lock:
            if self._path is None and importlib.util.find_spec(ROOT) is not None:
                self._path = await self._build()
            return self._path

    async def _build(self) -> Path:
        self._tries += 1
        target = await self._home() / f"kernel{self._tries}"
        places = [place for place in sys.path if Path(place).is_absolute()]
        package = str(Path(__file__).parents[2])
        process = await self._spawner.execute(
            [sys.executable, "-I", "-S", "-c", _MAIN, package, str(target), *places], env={}, cwd="/",
            timeout_s=_DEADLINE_S, token=None,
        )  # fmt: skip
        running = Running(
            process, lambda: self._spawner.kill(process.pid), b"", output_bytes=4096, report_bytes=0, leave_s=10.0
        )
        done = await running.result(_DEADLINE_S)
        if done.exit_code != 0 or not (target / DONE).exists():
            said = done.output.decode("utf-8", "replace").strip()[-1000:]
            raise SandboxError(f"ipykernel cannot be laid out in {target}: {said or done.exit_code}", boundary="python")
        return target
