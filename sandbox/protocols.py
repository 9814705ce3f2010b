"""What the other packages hold of a sandbox: its records, and the Protocols that every backend keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, runtime_checkable

import msgspec


class CommandResult(msgspec.Struct, frozen=True):
    """What one shell command did.

    Args:
        exit_code: of the last command; 124 where the time-out ended it and nothing better is known.
        output: stdout and stderr as the terminal showed them, UTF-8 with replacement; head and tail where truncated.
        cwd: the shell's directory afterwards.
        duration_s: wall seconds from the call to the result.
        truncated: bytes were left out in the middle; a line there says how many.
        timed_out: the time-out ended the command.
        restarted: the shell itself was lost and started again: files are kept, variables and functions are not.
    """

    exit_code: int
    output: str
    cwd: str
    duration_s: float
    truncated: bool = False
    timed_out: bool = False
    restarted: bool = False


class CellResult(msgspec.Struct, frozen=True):
    """What one cell of Python did.

    Args:
        text: what was printed and shown, in order; head and tail where truncated.
        error: the traceback, without colours, of what it raised; why the kernel was lost, where that ended the cell.
        images: PNG or JPEG in base64 (they begin with "iVBOR" and "/9j/"); at most 8, of 8 MiB together.
        duration_s: wall seconds from the call to the result, the kernel's start included where it had to be started.
        truncated: text was left out in the middle; a line there says how many bytes.
        timed_out: the time-out ended the cell.
        restarted: the kernel was lost, before or in this cell: variables and imports are gone, files are kept.
    """

    text: str
    error: str | None
    images: tuple[str, ...]
    duration_s: float
    truncated: bool = False
    timed_out: bool = False
    restarted: bool = False


class Execution(msgspec.Struct, frozen=True):
    """What one program did that ran alone in a sandbox.

    Args:
        exit_code: of the program; 128 + N where signal N ended it, 124 where the time-out did.
        report: what was written to descriptor 3, as far as it fits.
        output: stdout and stderr as one stream; head and tail where truncated.
        duration_s: wall seconds, the start of the sandbox included.
        truncated: bytes of the output were left out in the middle.
        timed_out: the time-out ended the program.
        report_overflow: more was written to descriptor 3 than is taken; that ended the program.
    """

    exit_code: int
    report: bytes
    output: bytes
    duration_s: float
    truncated: bool = False
    timed_out: bool = False
    report_overflow: bool = False


class FileEntry(msgspec.Struct, frozen=True):
    """One name in a directory; `size_bytes` of files, `target` of links."""

    name: str
    kind: Literal["file", "directory", "link", "other"]
    size_bytes: int = 0
    target: str = ""


class SandboxLimits(msgspec.Struct, frozen=True):
    """Bounds of one sandbox.

    Args:
        output_bytes: most bytes of one command's output that are kept.
        interrupt_grace_s: from the interrupt of a timed-out command to its kill.
        kill_grace_s: from the first kill to the kill of the shell itself.
        start_s: deadline of a start, and of a stop.
        shm_mib: size of /dev/shm.
        file_bytes: largest file that `files` reads or writes.
        pack_bytes: most bytes that a pack of its changes has, uncompressed.
        pack_entries: most names in a pack.
    """

    output_bytes: int = 64 * 1024
    interrupt_grace_s: float = 1.0
    kill_grace_s: float = 1.0
    start_s: float = 20.0
    shm_mib: int = 64
    file_bytes: int = 64 * 1024 * 1024
    pack_bytes: int = 16 * 1024**3
    pack_entries: int = 1_000_000


class ShellState(msgspec.Struct, frozen=True):
    """What a shell was like, so that another can go on from there.

    Args:
        cwd: its directory.
        exports: the exported variables, one `NAME=word` a line, the word quoted for bash.
        root: what stood before every path of the sandbox; empty where its root was "/".
    """

    cwd: str
    exports: str
    root: str = ""


class SandboxSpec(msgspec.Struct, frozen=True):
    """Of what a sandbox is made.

    Args:
        image: "host" for the allow-listed root of this machine, or the absolute path of an unpacked image.
        layers: unpacked layer directories on node-local disk, lowest first; at most 8.
        workspace: absolute paths in the sandbox, made where missing; the shell starts in the first ("/work" without).
        env: variables beside the sandbox's own PATH, HOME, TERM, LANG, USER and SHELL.
        network: "none": a loopback device and nothing else.
        limits: bounds of this sandbox.
        upper: an unpacked layer on the backend's own filesystem that becomes what this sandbox has changed so far: it
            is consumed, and `pack` gives it together with what changes later.
        shell: what the first shell starts from, instead of the workspace and `env` alone.
    """

    image: str = "host"
    layers: tuple[str, ...] = ()
    workspace: tuple[str, ...] = ("/work",)
    env: dict[str, str] = {}
    network: Literal["none"] = "none"
    limits: SandboxLimits = SandboxLimits()
    upper: str | None = None
    shell: ShellState | None = None


class PackedLayer(msgspec.Struct, frozen=True):
    """A layer as one file.

    Args:
        digest: "sha256:<hex>" of the canonical uncompressed tar.
        size_bytes: of the compressed file.
        path: of the file, node-local; the sandbox's stop removes it, so move or read it before.
        tar_bytes: size of the uncompressed tar.
        entries: names in it.
        skipped: names left out as no layer can hold them: sockets, FIFOs, devices, names that look like whiteouts.
    """

    digest: str
    size_bytes: int
    path: str
    tar_bytes: int = 0
    entries: int = 0
    skipped: int = 0


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
