"""A Sandbox whose tools are a bash on a pty and confined files, on whatever ground its backend gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from sandbox.bashtext import shell_env
from sandbox.errors import SandboxError
from sandbox.execution import Running
from sandbox.files import ConfinedFiles
from sandbox.ground import Entry, Ground
from sandbox.kernel.layer import KernelLayer
from sandbox.kernel.tool import KernelPython, Place
from sandbox.layers import pack
from sandbox.protocols import Execution, PackedLayer
from sandbox.scratch import remove_tree
from sandbox.spawn_client import SpawnClient, Spawned
from sandbox.terminal import Terminal


class PtySandbox:
    """See `Sandbox`. Made by a backend; starts at the first use of a tool.

    Args:
        ground: its place on this node.
        spawner: starts and kills its processes.
        layer: our ipykernel, for images that have none.
        on_stop: tells the backend that it is gone.
    """

    def __init__(
        self, ground: Ground, spawner: SpawnClient, layer: KernelLayer, on_stop: Callable[[PtySandbox], None]
    ) -> None:
        self._ground, self._spawner, self._on_stop = ground, spawner, on_stop
        limits = ground.spec.limits
        self._terminal = Terminal(
            spawner, self._launch, ground.workspace(), limits, ground.token, root=ground.prefix, state=ground.spec.shell
        )
        self._files = ConfinedFiles(self._root, limits.file_bytes)
        self._python = KernelPython(spawner, self._kernel_place, layer, limits, resumed=ground.spec.shell is not None)
        self._entry: Entry | None = None
        self._running: Running | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._packs = 0

    @property
    def shell(self) -> Terminal:
        """See `Sandbox.shell`."""
        return self._terminal

    @property
    def files(self) -> ConfinedFiles:
        """See `Sandbox.files`."""
        return self._files

    @property
    def python(self) -> KernelPython:
        """See `Sandbox.python`."""
        return self._python

    async def start(self) -> None:
        """See `Sandbox.start`."""
        await self._terminal.start()

    async def execute(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",  # noqa: A002 - see Sandbox.execute
        env: Mapping[str, str] = {},
        cwd: str = "/",
        timeout_s: float = 60.0,
        output_bytes: int = 64 * 1024,
        report_bytes: int = 8 * 1024 * 1024,
    ) -> Execution:
        """See `Sandbox.execute`."""
        if not argv or not argv[0].startswith("/"):
            raise SandboxError(f"execute got {list(argv[:1])}: name the program by its absolute path", boundary="start")
        if self._entry is None:
            await self.start()  # the first shell makes the workspace
        async with self._terminal.lock:
            self._refuse_stopped()
            await self._python.kill()
            await self._terminal.kill()
            entry = self._ground.enter(argv, env, cwd)
            start_s, token = self._ground.spec.limits.start_s, self._ground.token
            process = await self._spawner.execute(
                entry.argv, env=entry.env, cwd=entry.cwd, timeout_s=start_s, token=token
            )
            self._running = Running(
                process, lambda: self._spawner.kill(process.pid, token), input,
                output_bytes=output_bytes, report_bytes=report_bytes, leave_s=start_s,
            )  # fmt: skip
            try:
                self._refuse_stopped()
                return await self._running.result(timeout_s)
            finally:
                await self._running.end()
                self._running = None

    async def stop(self) -> None:
        """See `Sandbox.stop`."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def reset(self) -> None:
        """See `Sandbox.reset`; the sandbox's directory is made anew at the next use."""
        if self._ground.spec.upper is not None:
            raise SandboxError("a sandbox that began with an upper cannot be reset: create another", boundary="start")
        async with self._terminal.lock:
            self._refuse_stopped()
            await self._python.kill()
            await self._terminal.kill()
            self._entry = None
            if not await asyncio.to_thread(remove_tree, self._ground.directory):
                raise SandboxError(f"cannot remove {self._ground.directory}", boundary="stop")

    async def pack(self, *, paths: Sequence[str] = ("/",), exclude: Sequence[str] = ()) -> PackedLayer:
        """See `Sandbox.pack`; the file lies in the sandbox's own directory."""
        self._refuse_stopped()
        await self.start()  # a sandbox that was never used has an empty layer, not none
        self._terminal.refuse_if_ended()  # what a signal from outside left half done is nobody's work
        self._packs += 1
        target, limits = self._ground.directory / f"layer{self._packs}.tar.zst", self._ground.spec.limits

        def work() -> PackedLayer:
            return pack(
                self._ground.trees(), target, paths=tuple(paths), exclude=tuple(exclude), max_bytes=limits.pack_bytes,
                max_entries=limits.pack_entries,
            )  # fmt: skip

        return await asyncio.to_thread(work)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _launch(self) -> Spawned:
        self._refuse_stopped()
        if self._entry is None:
            self._entry = await asyncio.to_thread(self._ground.prepare)
        entry = self._entry
        return await self._spawner.spawn(
            entry.argv, env=entry.env, cwd=entry.cwd, timeout_s=self._ground.spec.limits.start_s
        )

    async def _kernel_place(self) -> Place:
        await self.start()
        process, entry = self._terminal.process, self._entry
        if process is None or entry is None:
            raise SandboxError("the sandbox has stopped", boundary="python")
        isolated = self._ground.token is None
        env = shell_env(self._ground.spec.env) if isolated else entry.env
        return Place(
            process.pid if isolated else None, {name: value for name, value in env.items() if name != "PS1"},
            next(iter(self._ground.workspace()), "/"), str(self._ground.directory),
        )  # fmt: skip

    async def _root(self) -> Path:
        await self.start()
        process = self._terminal.process
        if process is None:
            raise SandboxError("the sandbox has stopped", boundary="files")
        return self._ground.root(process.pid)

    async def _stop(self) -> None:
        try:
            await self._python.kill()
            await self._terminal.kill()
            if self._running is not None:
                await self._running.end()
        finally:
            gone = await asyncio.to_thread(remove_tree, self._ground.directory)
            self._on_stop(self)
        if not gone:
            raise SandboxError(f"cannot remove {self._ground.directory}: remove it by hand", boundary="stop")

    def _refuse_stopped(self) -> None:
        if self._stopping is not None:
            raise SandboxError("the sandbox has stopped; create another", boundary="start")
