"""A sandbox without processes for tests of others: commands answer from a script, files and layers are real."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from sandbox.directory import DirectoryGround, loopback
from sandbox.errors import SandboxError
from sandbox.files import ConfinedFiles
from sandbox.layers import pack
from sandbox.protocols import CellResult, CommandResult, Execution, PackedLayer, Program, SandboxSpec, ShellState
from sandbox.scratch import make_private, remove_tree

Answer = str | CommandResult
Script = Mapping[str, Answer] | Callable[[str], Answer]
"""What each command answers: its output (exit code 0) or a whole result."""


Programs = Callable[[Sequence[str], bytes], Execution]
"""What each executed program did, by its command line and its input."""


Cells = Mapping[str, str | CellResult]
"""What each cell of Python answers: its text or a whole result."""


class ScriptedShell:
    """Answers from the script and keeps the commands it was given; one that the script lacks exits with 127."""

    def __init__(self, script: Script, start: Callable[[], object], cwd: str) -> None:
        self._script, self._start, self._cwd = script, start, cwd
        self.commands: list[str] = []

    async def run(self, command: str, timeout_s: float = 30.0) -> CommandResult:
        """See `Shell.run`; takes no time."""
        del timeout_s
        self._start()
        self.commands.append(command)
        answer = self._script(command) if callable(self._script) else self._script.get(command)
        if isinstance(answer, CommandResult):
            return answer
        if answer is None:
            return CommandResult(127, f"fake: the script has no answer to {command!r}\n", self._cwd, 0.0)
        return CommandResult(0, answer, self._cwd, 0.0)

    async def close(self) -> None:
        """See `Shell.close`."""

    async def state(self) -> ShellState:
        """See `Shell.state`; no variables."""
        return ShellState(self._cwd, "")


class ScriptedPython:
    """Answers cells from a script and keeps the code it was given; code that the script lacks raises a NameError."""

    def __init__(self, script: Cells, start: Callable[[], object]) -> None:
        self._script, self._start = script, start
        self.cells: list[str] = []

    async def run(self, code: str, timeout_s: float = 30.0) -> CellResult:
        """See `Python.run`; takes no time."""
        del timeout_s
        self._start()
        self.cells.append(code)
        answer = self._script.get(code)
        if isinstance(answer, CellResult):
            return answer
        error = f"NameError: fake: the script has no answer to {code!r}" if answer is None else None
        return CellResult(answer or "", error, (), 0.0)

    async def restart(self) -> None:
        """See `Python.restart`."""
        self._start()


class FakeSandbox:
    """See `Sandbox`."""

    def __init__(
        self, ground: DirectoryGround, script: Script, programs: Programs | None = None, cells: Cells | None = None
    ) -> None:
        self._ground, self._script, self._programs = ground, script, programs
        self.executed: list[tuple[str, ...]] = []
        self._started = self._stopped = False
        self._packs = 0
        workspace = ground.spec.workspace
        self._shell = ScriptedShell(script, self._begin, workspace[0] if workspace else "/")
        self._files = ConfinedFiles(self._root, ground.spec.limits.file_bytes)
        self._python = ScriptedPython(cells or {}, self._begin)

    @property
    def shell(self) -> ScriptedShell:
        """See `Sandbox.shell`."""
        return self._shell

    def open_shell(self) -> ScriptedShell:
        """See `Sandbox.open_shell`; answers from the same script."""
        workspace = self._ground.spec.workspace
        return ScriptedShell(self._script, self._begin, workspace[0] if workspace else "/")

    async def open_program(self, command: str, *, rows: int = 50, columns: int = 200) -> Program:
        """See `Sandbox.open_program`; there are no terminals here."""
        raise SandboxError(f"fake: no terminal for {command!r} ({rows} x {columns})", boundary="shell")

    @property
    def files(self) -> ConfinedFiles:
        """See `Sandbox.files`."""
        return self._files

    @property
    def python(self) -> ScriptedPython:
        """See `Sandbox.python`."""
        return self._python

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
        """See `Sandbox.execute`; takes no time, and a program that nobody scripted exits with 127."""
        del env, cwd, timeout_s, output_bytes, report_bytes
        self._begin()
        self.executed.append(tuple(argv))
        if self._programs is None:
            return Execution(127, b"", b"fake: no programs are scripted\n", 0.0)
        return self._programs(argv, input)

    async def listen(self) -> socket.socket:
        """See `Sandbox.listen`; on this machine's loopback."""
        self._begin()
        return loopback()

    async def start(self) -> None:
        """See `Sandbox.start`."""
        self._begin()

    async def stop(self) -> None:
        """See `Sandbox.stop`."""
        self._stopped = True
        await asyncio.to_thread(remove_tree, self._ground.directory)

    async def reset(self) -> None:
        """See `Sandbox.reset`."""
        if self._started:
            await asyncio.to_thread(remove_tree, self._ground.directory)
            self._started = False

    async def pack(self, *, paths: Sequence[str] = ("/",), exclude: Sequence[str] = ()) -> PackedLayer:
        """See `Sandbox.pack`."""
        self._begin()
        self._packs += 1
        target = self._ground.directory / f"layer{self._packs}.tar.zst"
        return await asyncio.to_thread(pack, self._ground.trees(), target, paths=paths, exclude=exclude)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _begin(self) -> None:
        if self._stopped:
            raise SandboxError("the sandbox has stopped; create another", boundary="start")
        if not self._started:
            self._ground.prepare()
            self._started = True

    async def _root(self) -> Path:
        self._begin()
        return self._ground.root(0)


class FakeBackend:
    """See `SandboxBackend`.

    Args:
        scratch: where the files lie.
        script: what commands answer.
        broken: an error that `probe` raises, where one is wanted.
        programs: what executed programs do.
        cells: what cells of Python answer.
    """

    name = "fake"

    def __init__(
        self, scratch: Path, script: Script | None = None, broken: SandboxError | None = None,
        programs: Programs | None = None, cells: Cells | None = None,
    ) -> None:  # fmt: skip
        self._home = make_private(scratch, "rollmill-fake-")
        self._script: Script = {} if script is None else script
        self._broken, self._programs, self._cells = broken, programs, cells
        self.sandboxes: list[FakeSandbox] = []

    async def probe(self) -> None:
        """See `SandboxBackend.probe`."""
        if self._broken is not None:
            raise self._broken

    def create(self, spec: SandboxSpec) -> FakeSandbox:
        """See `SandboxBackend.create`."""
        directory = self._home / f"s{len(self.sandboxes) + 1}"
        self.sandboxes.append(FakeSandbox(DirectoryGround(spec, directory), self._script, self._programs, self._cells))
        return self.sandboxes[-1]

    async def close(self) -> None:
        """See `SandboxBackend.close`."""
        for sandbox in self.sandboxes:
            await sandbox.stop()
        await asyncio.to_thread(remove_tree, self._home)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
