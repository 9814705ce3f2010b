"""A Sandbox whose tools are a bash on a pty and confined files, on whatever ground its backend gives."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from sandbox.bashtext import SHELL_ARGV, shell_env
from sandbox.directory import loopback
from sandbox.errors import LimitExceeded, SandboxError, SpawnerError
from sandbox.execution import Running
from sandbox.files import ConfinedFiles
from sandbox.ground import Entry, Ground
from sandbox.interactive import InteractiveProgram
from sandbox.kernel.layer import KernelLayer
from sandbox.kernel.tool import KernelPython, Place
from sandbox.layers import pack
from sandbox.limits import UNBOUNDED, Bounds
from sandbox.protocols import Execution, PackedLayer
from sandbox.pty_calls import weakly
from sandbox.scratch import remove_tree
from sandbox.spawn_client import SpawnClient
from sandbox.started import Spawned
from sandbox.terminal import Terminal


class PtySandbox:
    """See `Sandbox`. Made by a backend; starts at the first use of a tool.

    Args:
        ground: its place on this node.
        spawner: starts and kills its processes.
        layer: our ipykernel, for images that have none.
        on_stop: tells the backend that it is gone.
        bounds: what it may use; its backend's watchdog ends it when it uses more.
        nothing: gives the layer of a sandbox in which nothing was changed.
    """

    def __init__(
        self, ground: Ground, spawner: SpawnClient, layer: KernelLayer, on_stop: Callable[[PtySandbox], None],
        bounds: Bounds = UNBOUNDED, *, nothing: Callable[[], Awaitable[PackedLayer]],
    ) -> None:  # fmt: skip
        self._ground, self._spawner, self._on_stop, self._nothing = ground, spawner, on_stop, nothing
        self.bounds, self._losses = bounds, spawner.losses
        self._exceeded: LimitExceeded | None = None
        limits = ground.spec.limits
        self._terminal = Terminal(
            spawner, weakly(self, PtySandbox._launch), ground.workspace(), limits, ground.token,
            holds=ground.token is None, root=ground.prefix, state=ground.spec.shell,
            torn=weakly(self, lambda mine: mine._entry is not None and mine._entry.torn()),
        )  # fmt: skip
        self._files = ConfinedFiles(weakly(self, PtySandbox._root), limits.file_bytes)
        place, resumed = weakly(self, PtySandbox._place), ground.spec.shell is not None
        self._python = KernelPython(spawner, place, layer, limits, resumed=resumed)
        self._opened: list[Terminal | InteractiveProgram] = []
        self._entry: Entry | None = None
        self._preparing: asyncio.Task[Entry] | None = None
        self._running: Running | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._packs = 0
        self._unchanged = False  # whether nothing had been changed in it when it was packed
        self._stirring = 0  # starts that are not known to be over: their ends would hit who is handed the directory

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

    def open_shell(self) -> Terminal:
        """See `Sandbox.open_shell`."""
        self._refuse_stopped()
        ground = self._ground
        launch = weakly(self, PtySandbox._launch_beside)
        shell = Terminal(self._spawner, launch, ground.workspace(), ground.spec.limits, holds=False, root=ground.prefix)
        self._opened.append(shell)
        return shell

    async def open_program(self, command: str, *, rows: int = 50, columns: int = 200) -> InteractiveProgram:
        """See `Sandbox.open_program`."""
        if "\0" in command:
            raise SandboxError("the command holds a NUL byte", boundary="shell")
        place, limits = await self._place(), self._ground.spec.limits
        process = await self._spawner.join_terminal(
            place.pid, ("/bin/bash", "-c", command), env={**place.env, "TERM": "linux"}, cwd=self._terminal.cwd,
            timeout_s=limits.start_s, plain=False, rows=rows, columns=columns,
        )  # fmt: skip
        self._refuse_late(process)
        program = InteractiveProgram(process, self._spawner, rows, columns, limits.start_s)
        self._opened.append(program)
        return program

    async def listen(self) -> socket.socket:
        """See `Sandbox.listen`."""
        place = await self._place()
        if place.pid is None:
            return loopback()
        made = await self._spawner.listen(place.pid, timeout_s=self._ground.spec.limits.start_s)
        return socket.socket(fileno=made.descriptor)

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
            await self._end_tools()
            entry = self._ground.enter(argv, env, cwd)
            start_s, token = self._ground.spec.limits.start_s, self._ground.token
            self._stirring += 1
            process = await self._spawner.execute(
                entry.argv, env=entry.env, cwd=entry.cwd, timeout_s=start_s, token=token
            )
            process.exited.add_done_callback(self._on_gone)
            self._running = Running(
                process, lambda: self._spawner.kill(process.pid, token), input,
                output_bytes=output_bytes, report_bytes=report_bytes, leave_s=start_s,
            )  # fmt: skip
            try:
                self._refuse_stopped()
                result = await self._running.result(timeout_s)
                self._refuse_stopped()  # what a limit cut off has no result, nor what went with the spawner
                return result
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
            await self._end_tools()
            if self._preparing is not None:
                await asyncio.wait({self._preparing})
            self._entry = self._preparing = None
            if not await asyncio.to_thread(remove_tree, self._ground.directory):
                raise SandboxError(f"cannot remove {self._ground.directory}", boundary="stop")

    async def pack(self, *, paths: Sequence[str] = ("/",), exclude: Sequence[str] = ()) -> PackedLayer:
        """See `Sandbox.pack`; the file lies in the sandbox's own directory, or is that of all who changed nothing."""
        self._refuse_stopped()
        await self.start()  # a sandbox that was never used has an empty layer, not none
        self._terminal.refuse_if_ended()  # what a signal from outside left half done is nobody's work
        self._unchanged = self._ground.untouched()
        if self._unchanged:
            return await self._nothing()
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

    async def _lay_out(self) -> Entry:
        if (entry := self._ground.prepare_at_once()) is None:
            if self._preparing is None:  # a thread goes on whoever was cancelled meanwhile: the next one waits for it
                self._preparing = asyncio.create_task(asyncio.to_thread(self._ground.prepare))
            entry = await asyncio.shield(self._preparing)
        self._refuse_stopped()
        self._entry = entry
        return entry

    async def _launch(self) -> Spawned:
        self._refuse_stopped()
        entry = self._entry or await self._lay_out()
        self._stirring += 1
        spawned = await self._spawner.spawn(
            entry.argv, env=entry.env, cwd=entry.cwd, timeout_s=self._ground.spec.limits.start_s,
            light=self._ground.token is not None,  # what is started is bash itself
        )  # fmt: skip
        spawned.exited.add_done_callback(self._on_gone)
        return self._refuse_late(spawned)

    async def _launch_beside(self) -> Spawned:
        """A further shell, joined to the sandbox that the first one holds."""
        try:
            return await self._join_shell()
        except SpawnerError:  # the first shell was lost just then, and its namespaces with it
            return await self._join_shell()

    async def _join_shell(self) -> Spawned:
        place = await self._place()
        argv = ("/bin/bash", *SHELL_ARGV)
        shell = await self._spawner.join_terminal(
            place.pid, argv, env={**place.env, "PS1": ""}, cwd=place.cwd, timeout_s=self._ground.spec.limits.start_s
        )
        return self._refuse_late(shell)

    def _on_gone(self, _: asyncio.Future[int]) -> None:
        self._stirring -= 1

    def _refuse_late(self, started: Spawned) -> Spawned:
        """What has started; ended again where the sandbox was stopped meanwhile, so that nobody else would end it."""
        try:
            self._refuse_stopped()
        except SandboxError:
            self._spawner.kill(started.pid, self._ground.token)
            started.close()
            raise
        return started

    async def _end_tools(self, remove: Path | None = None) -> None:
        """End whatever runs in the sandbox; further shells go first, for they live in what the first one holds."""
        try:
            ended = await asyncio.gather(*(one.close() for one in self._opened), return_exceptions=True)
            self._opened = [one for one in self._opened if isinstance(one, Terminal)]
            await self._python.kill()
        finally:  # whatever would not go goes with the first shell's namespaces
            await self._terminal.kill(remove)
        for failed in ended:
            if isinstance(failed, BaseException):
                raise failed

    async def _place(self) -> Place:
        self._refuse_stopped()
        await self._begin()
        process, entry = self._terminal.process, self._entry
        if process is None or entry is None:
            raise SandboxError("the sandbox has stopped", boundary="python")
        isolated = self._ground.token is None
        env = shell_env(self._ground.spec.env) if isolated else entry.env
        return Place(
            process.pid if isolated else None, {name: value for name, value in env.items() if name != "PS1"},
            next(iter(self._ground.workspace()), "/"), str(self._ground.directory),
        )  # fmt: skip

    async def _begin(self) -> None:
        """As `start`, but without waiting until a command ends that another runs: the sandbox is there beside it."""
        if self._terminal.prompted.is_set():
            return
        starting = asyncio.ensure_future(self._terminal.start())
        prompted = asyncio.ensure_future(self._terminal.prompted.wait())
        try:
            await asyncio.wait((starting, prompted), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
        finally:
            starting.cancel()
            prompted.cancel()
            await asyncio.wait((starting, prompted))  # what was half started is ended by then

    async def _root(self) -> Path:
        self._refuse_stopped()
        await self._begin()
        process = self._terminal.process
        if process is None:
            raise SandboxError("the sandbox has stopped", boundary="files")
        return self._ground.root(process.pid)

    async def _stop(self) -> None:
        keeps = self._running is None and self._exceeded is None and self._ground.keeps()
        keeps = keeps and (self._unchanged or self._ground.untouched())
        try:
            try:
                await self._end_tools(None if keeps or self._running is not None else self._ground.directory)
            finally:
                if self._running is not None:
                    await self._running.end()
        except BaseException:  # something may still be there; raised again
            keeps = False
            raise
        finally:
            if self._preparing is not None:
                await asyncio.wait({self._preparing})
            gone = (keeps and not self._stirring and self._ground.hand_on()) or not self._ground.directory.exists()
            gone = gone or await asyncio.to_thread(remove_tree, self._ground.directory)
            self._on_stop(self)
        if not gone:
            raise SandboxError(f"cannot remove {self._ground.directory}: remove it by hand", boundary="stop")

    @property
    def roots(self) -> frozenset[int]:
        """See `Watched.roots`; empty once it was ended."""
        if self._exceeded is not None or self._stopping is not None:
            return frozenset()
        found = [one.pid for one in (self._terminal.process, self._running) if one is not None]
        return frozenset(pid for one in found for pid in (one, *self._spawner.beside(one)))

    @property
    def directory(self) -> Path:
        """See `Watched.directory`."""
        return self._ground.directory

    @property
    def given(self) -> tuple[int, int]:
        """See `Watched.given`."""
        return (0, 0) if self._entry is None else self._entry.given

    def end(self, reason: LimitExceeded) -> None:
        """See `Watched.end`; its directory goes at its stop."""
        pids = self.roots
        self._exceeded = self._terminal.ended_for = reason
        for pid in pids:
            self._spawner.kill(pid, self._ground.token)

    def _refuse_stopped(self) -> None:
        if self._exceeded is not None:
            raise self._exceeded
        if self._stopping is not None:
            raise SandboxError("the sandbox has stopped; create another", boundary="start")
        self._spawner.refuse_lost(self._losses)
