"""What the other packages hold of a sandbox: its records, and the Protocols that every backend keeps."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from sandbox.records import (
    CellResult,
    CommandResult,
    Execution,
    FileEntry,
    PackedLayer,
    SandboxLimits,
    SandboxSpec,
    Screen,
    ShellState,
)

__all__ = [
    "CellResult",
    "CommandResult",
    "Execution",
    "FileEntry",
    "Files",
    "PackedLayer",
    "Program",
    "Python",
    "Sandbox",
    "SandboxBackend",
    "SandboxLimits",
    "SandboxSpec",
    "Screen",
    "Shell",
    "ShellState",
]


class Shell(Protocol):
    """One persistent bash: directory, variables, functions and options live from command to command."""

    async def run(self, command: str, timeout_s: float = 30.0) -> CommandResult:
        """Run a command of any size and lines; commands of one shell run one after the other.

        A time-out is a result (`timed_out`), never an error.

        Raises:
            ShellDied: the shell is gone and could not be started again.
        """
        ...

    async def close(self) -> None:
        """End the shell, and the processes that its terminal ends; its next command starts another. Idempotent."""
        ...

    async def state(self) -> ShellState:
        """Directory, exported variables, functions, aliases and options; a command that still runs is ended first.

        Raises:
            ShellDied: the shell is gone, or does not tell.
        """
        ...


class Program(Protocol):
    """One interactive program on a terminal of its own, as a person has it: 50 rows of 200 columns unless told."""

    async def send(self, text: str = "", *, keys: Sequence[str] = (), wait_s: float = 1.0) -> Screen:
        """Type text, then keys by their names ("enter", "up", "ctrl-c"), and give the screen as `screen` does.

        Raises:
            ValueError: there is no such key, or it is more than 64 KiB.
        """
        ...

    async def screen(self, wait_s: float = 0.0) -> Screen:
        """The screen, once something came and then nothing for a tenth of a second; at the latest after `wait_s`."""
        ...

    async def wait(self, timeout_s: float) -> Screen:
        """The screen when the program has ended, or when the time is over: then it still runs."""
        ...

    async def close(self) -> None:
        """End it; idempotent."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Python(Protocol):
    """One persistent Python interpreter in the sandbox, beside its shell, on the same files; started at first use.

    A checkpoint does not hold its state: in a sandbox that goes on from one, the first cell says `restarted`.
    """

    async def run(self, code: str, timeout_s: float = 30.0) -> CellResult:
        """Run one cell; cells run one after the other, and variables live from cell to cell.

        A time-out is a result, never an error: the cell is interrupted, and where it does not obey the kernel is killed
        and the next cell gets a new one. `input()` raises in the cell.

        Raises:
            PythonUnavailable: no kernel starts in this sandbox.
            SandboxError: the sandbox itself cannot be started.
        """
        ...

    async def restart(self) -> None:
        """End the interpreter, with what runs in it, and start another; raises as `run` does."""
        ...


class Files(Protocol):
    """The sandbox's files; no path and no link leads out. All raise FilesError."""

    async def read(self, path: str, *, limit_bytes: int | None = None) -> bytes:
        """The file's bytes; refuses files above the limit, and what is not a regular file."""
        ...

    async def read_text(self, path: str, *, limit_bytes: int | None = None) -> str:
        """The file as UTF-8, undecodable bytes replaced."""
        ...

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """Write the whole file atomically, with the directories above it; a link at `path` is replaced."""
        ...

    async def list(self, path: str) -> tuple[FileEntry, ...]:
        """The directory's entries, sorted by name."""
        ...

    async def view(self, path: str, first: int = 1, last: int | None = None) -> str:
        """Lines of a file behind their numbers, from 1; at most 64 K characters of them."""
        ...

    async def create(self, path: str, text: str) -> None:
        """Write a file that is not there yet."""
        ...

    async def replace(self, path: str, old: str, new: str) -> None:
        """Replace the one occurrence of `old`; none or several are refused and the message counts them."""
        ...

    async def insert(self, path: str, line: int, text: str) -> None:
        """Put lines in after line `line`; 0 is before the first."""
        ...

    async def undo(self, path: str) -> None:
        """Take back the last `create`, `replace` or `insert` of this file; the last 64 edits of a sandbox are known."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file or a link."""
        ...

    async def patch(self, diff: str | bytes, *, directory: str = "/") -> tuple[str, ...]:
        """Apply a unified diff, wholly or not at all; the paths that it changed. A link is followed, as by every edit.

        Args:
            diff: as `git diff` or `diff -u` writes it; `a/` and `b/` are taken off.
            directory: what its relative paths are relative to.
        """
        ...

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file of this machine into the sandbox."""
        ...

    async def download(self, path: str, target: Path) -> None:
        """Copy a file of the sandbox to a new file of this machine."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    """What an agent may touch: an image, layers, a private upper, and tools on them."""

    @property
    def shell(self) -> Shell:
        """The terminal; its first use starts the sandbox."""
        ...

    def open_shell(self) -> Shell:
        """A further shell in the same sandbox, with directory and variables of its own; it starts at its first command.

        It sees the processes of the first shell, and ends where that ends: its next command then says `restarted`. No
        checkpoint holds it.
        """
        ...

    async def open_program(self, command: str, *, rows: int = 50, columns: int = 200) -> Program:
        """Start a program that wants a terminal, with the sandbox's own variables, in the shell's directory.

        Args:
            command: for bash.
            rows: of its terminal.
            columns: of its terminal.

        Raises:
            SandboxError: it cannot be started.
        """
        ...

    @property
    def files(self) -> Files:
        """The files; their first use starts the sandbox."""
        ...

    @property
    def python(self) -> Python:
        """The interpreter."""
        ...

    async def execute(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",  # noqa: A002 - as of subprocess.run
        env: Mapping[str, str] = {},
        cwd: str = "/",
        timeout_s: float = 60.0,
        output_bytes: int = 64 * 1024,
        report_bytes: int = 8 * 1024 * 1024,
    ) -> Execution:
        """Run one program alone in the sandbox, from a clean start, and leave nothing of it running.

        The shell and all that runs in the sandbox are ended first; the program then gets namespaces of its own on the
        same files, and when it ends everything that it started is killed. So neither what a shell was left like nor a
        process in the background can reach it; files are all that passes from one to the next. The next command of the
        shell finds a new one (`restarted`). The program has stdin, one pipe for stdout and stderr, and the write end of
        a pipe as descriptor 3; all three end with it, and so does what holds them. It has no privilege and no terminal.

        Args:
            argv: the program by its absolute path, and its arguments.
            input: the whole of its stdin, through a pipe: once it is read, nobody else can read it.
            env: its whole environment, but for what the backend sets itself.
            cwd: a directory of the sandbox.
            timeout_s: wall seconds; a time-out is a result (`timed_out`), never an error.
            output_bytes: most bytes of stdout and stderr that are kept.
            report_bytes: most bytes that descriptor 3 takes.

        Raises:
            SandboxError: the program cannot be started, or did not go away.
        """
        ...

    async def listen(self) -> socket.socket:
        """A socket of this process that listens on the sandbox's own loopback, at a port of its own.

        What runs in the sandbox can connect to 127.0.0.1 there, with no network and no program of ours in between;
        nobody else can reach it. It is of use until the sandbox's first shell ends; the caller closes it. A sandbox
        without a network of its own (sandbox=none) gives one on this machine's loopback, which other users reach too.

        Raises:
            SandboxError: it cannot be made, or the sandbox has stopped.
        """
        ...

    async def start(self) -> None:
        """Start now rather than at first use; a second call does nothing.

        Raises:
            SandboxError: boundary "start"; the message holds what the machine said.
        """
        ...

    async def stop(self) -> None:
        """End every process, release the mounts, remove the scratch; idempotent, and not undone by cancellation."""
        ...

    async def reset(self) -> None:
        """End every process and throw away all that was changed: the files are again those of image and layers.

        Raises:
            SandboxError: something did not go away; or the sandbox began with an upper, which is gone then.
        """
        ...

    async def pack(self, *, paths: Sequence[str] = ("/",), exclude: Sequence[str] = ()) -> PackedLayer:
        """Pack what this sandbox changed over its image and layers; nothing may be running in it that writes.

        Args:
            paths: absolute paths whose changes are taken.
            exclude: globs left out; one with a slash meets the whole path, one without meets a name at any depth.

        Raises:
            LayerError: the changes cannot be packed; `detail["content"]` is True where it is for what they are.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class SandboxBackend(Protocol):
    """One way to isolate; a worker holds one for its whole life and closes it at its end."""

    @property
    def name(self) -> str:
        """As `sandbox=` names it."""
        ...

    async def probe(self) -> None:
        """Prove by doing that this machine and user can isolate.

        Raises:
            SandboxUnavailable: it cannot; what failed and what to ask for.
        """
        ...

    def create(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that is not started yet; costs nothing."""
        ...

    async def close(self) -> None:
        """Stop every sandbox and remove all that the backend made; idempotent."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
