"""A sandbox for tests of tasks and agents: real bash and real files in a temporary directory, no isolation."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sandbox.protocols import CommandResult, Execution, FileEntry, PackedLayer, ShellState


class DirectorySandbox:
    """`/work` is `root`/work, where each command starts; every command is a bash of its own.

    Args:
        root: an empty directory.
        answer: gives a result in bash's place, for what is hard to bring about.
    """

    def __init__(self, root: Path, answer: Callable[[str], CommandResult | None] = lambda command: None) -> None:
        self._root = root
        self._answer = answer
        (root / "work").mkdir(exist_ok=True)
        self.commands: list[str] = []
        self.timeouts_s: list[float] = []

    @property
    def shell(self) -> Self:
        return self

    @property
    def files(self) -> Self:
        return self

    @property
    def python(self) -> Any:
        raise AssertionError("no task under test runs Python cells")

    async def run(self, command: str, timeout_s: float = 30.0) -> CommandResult:
        self.commands.append(command)
        self.timeouts_s.append(timeout_s)
        given = self._answer(command)
        if given is not None:
            return given
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", command.replace("/work", str(self._root / "work")), cwd=self._root / "work",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        return CommandResult(process.returncode or 0, output.decode(), "/work", 0.0)

    async def state(self) -> ShellState:
        return ShellState("/work", "")

    def _path(self, path: str) -> Path:
        assert path.startswith("/work/") and ".." not in path, path
        return self._root / path[1:]

    async def read(self, path: str, *, limit_bytes: int | None = None) -> bytes:
        return self._path(path).read_bytes()

    async def read_text(self, path: str, *, limit_bytes: int | None = None) -> str:
        return self._path(path).read_text()

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        target = self._path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data.encode() if isinstance(data, str) else data)

    async def list(self, path: str) -> tuple[FileEntry, ...]:
        raise AssertionError("not used by the tasks under test")

    async def replace(self, path: str, old: str, new: str) -> None:
        raise AssertionError("not used by the tasks under test")

    async def upload(self, source: Path, path: str) -> None:
        raise AssertionError("not used by the tasks under test")

    async def download(self, path: str, target: Path) -> None:
        raise AssertionError("not used by the tasks under test")

    async def execute(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",  # noqa: A002 - see Sandbox.execute
        env: Mapping[str, str] = {},
        cwd: str = "/",
        timeout_s: float = 60.0,
        output_bytes: int = 65536,
        report_bytes: int = 8 * 1024 * 1024,
    ) -> Execution:
        """A program of this machine; its report goes by way of a file."""
        report = self._root / "report"

        def run() -> tuple[int, bytes]:
            try:
                done = subprocess.run(
                    ["/bin/bash", "-c", 'exec 3> "$0"; exec "$@"', str(report), *argv], input=input, env=dict(env),
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                return 124, error.output or b""
            return done.returncode, done.stdout

        code, output = await asyncio.to_thread(run)
        told = report.read_bytes()
        return Execution(
            code, told[:report_bytes], output[:output_bytes], 0.0, timed_out=code == 124,
            report_overflow=len(told) > report_bytes,
        )  # fmt: skip

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reset(self) -> None:
        raise AssertionError("not used by the tasks under test")

    async def pack(self, *, paths: Sequence[str] = ("/",), exclude: Sequence[str] = ()) -> PackedLayer:
        raise AssertionError("not used by the tasks under test")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...
