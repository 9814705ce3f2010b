"""The records that pass between a sandbox and who holds it: results, limits, and of what a sandbox is made."""

from __future__ import annotations

from typing import Literal

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


class Screen(msgspec.Struct, frozen=True):
    """What the terminal of an interactive program shows.

    Args:
        text: its lines without trailing blanks, and without the empty ones at the end.
        row: of the cursor, from 0.
        column: of the cursor, from 0.
        running: the program runs.
        exit_code: of a program that has ended; 128 + N where signal N ended it.
        dropped: bytes of output that came since the last look and were too many to be shown.
    """

    text: str
    row: int
    column: int
    running: bool
    exit_code: int | None = None
    dropped: int = 0


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
        definitions: what bash evaluates to have its functions, aliases and `shopt` options, one quoted word a line.
        options: as `shopt -po` gives them.
    """

    cwd: str
    exports: str
    root: str = ""
    definitions: str = ""
    options: str = ""


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
