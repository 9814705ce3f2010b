"""What the other packages hold of a sandbox: its records, and the Protocols that every backend keeps."""

from __future__ import annotations

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
    ShellState,
)

__all__ = [
    "CellResult",
    "CommandResult",
    "Execution",
    "FileEntry",
    "Files",
    "PackedLayer",
    "Python",
    "Sandbox",
    "SandboxBackend",
    "SandboxLimits",
    "SandboxSpec",
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

    async def state(self) -> ShellState:
        """Directory and exported variables as they are now; a command that is still running is ended first.

        Raises:
            ShellDied: the shell is gone, or does not tell.
        """
        ...


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

    async def replace(self, path: str, old: str, new: str) -> None:
        """Replace the one occurrence of `old`; none or several are refused and the message counts them."""
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
