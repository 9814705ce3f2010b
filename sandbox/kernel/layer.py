"""Our ipykernel for images that have none: laid out once an installation, in its share/, where that may be written."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from sandbox.errors import SandboxError
from sandbox.execution import Running
from sandbox.kernel.distributions import DONE, ROOT, needed
from sandbox.scratch import make_private, remove_tree
from sandbox.spawn_client import SpawnClient

_MAIN = "import sys; sys.path.append(sys.argv.pop(1)); from sandbox.kernel.distributions import main; main()"
_DEADLINE_S = 120.0
"""Two seconds of work on an idle core: 900 files to link, 400 modules to compile."""
SHARED = Path(sys.prefix) / "share/rollmill"
"""Beside what it is made of: its files are links, and whoever may write there could change them anyway."""


class KernelLayer:
    """Belongs to one event loop.

    Args:
        spawner: runs the program that lays it out.
        home: the worker's private directory: where it is laid out when the installation's own cannot be written.
        shared: where it stays.
    """

    def __init__(
        self, spawner: SpawnClient, home: Callable[[], Awaitable[Path]], shared: Path = SHARED
    ) -> None:  # fmt: skip
        self._spawner, self._home, self._shared = spawner, home, shared
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
                lasting = self._shared / await asyncio.to_thread(_name)
                if not await asyncio.to_thread((lasting / DONE).exists):
                    lasting = await self._build(lasting)
                self._path = lasting
            return self._path

    async def _build(self, lasting: Path) -> Path:
        """Lay it out, under a name of its own until it is whole."""
        self._tries += 1
        target = await asyncio.to_thread(_new_place, lasting) or await self._home() / f"kernel{self._tries}"
        try:
            await self._fill(target)
            if target.parent == lasting.parent:
                await asyncio.to_thread(_settle, target, lasting)
                return lasting
        except BaseException:  # half of it serves nobody; raised again
            await asyncio.to_thread(remove_tree, target)
            raise
        return target

    async def _fill(self, target: Path) -> None:
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


def _name() -> str:
    """Of the layer: another one for other versions of what it is made of."""
    parts = [f"{one.name} {one.version} {one.locate_file('')}" for one in needed()]
    return "kernel-" + hashlib.sha256("\n".join([sys.version, *sorted(parts)]).encode()).hexdigest()[:16]


def _new_place(lasting: Path) -> Path | None:
    """A name beside the lasting one that nobody has; None where no directory can be made there."""
    with suppress(OSError):
        lasting.parent.mkdir(parents=True, exist_ok=True)
        place = make_private(lasting.parent, f".{lasting.name}-")
        place.rmdir()  # the program makes it
        return place
    return None


def _settle(target: Path, lasting: Path) -> None:
    """Give it its lasting name, unless another worker was first."""
    try:
        target.rename(lasting)
    except OSError:
        if not (lasting / DONE).exists():
            raise
        remove_tree(target)
