"""What a child of the spawner does between its fork and its exec: signals, limits, descriptors, and what it becomes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import resource
import shutil
import signal
import struct
import termios
from typing import Any, Final, NoReturn

from sandbox.joining import COMMAND_FD, make_plain

REPORT_FD: Final = 3
"""Descriptor of the report pipe in a program that is executed."""
WORKERS_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""They mean the worker: the spawner ignores them, its children do what programs do."""
LIMITS: Final[dict[int, int]] = {}
"""Kind of resource limit -> what each child gets."""
_PR_SET_PDEATHSIG: Final = 1
_IN_SLURM_JOB: Final = "SLURM_JOB_ID" in os.environ
_DEFAULTS: Final = tuple(
    number
    for number in (signal.SIGPIPE, signal.SIGXFSZ, *WORKERS_SIGNALS)
    if not (_IN_SLURM_JOB and number == signal.SIGUSR2)
)
_libc = ctypes.CDLL(None, use_errno=True)


def prepare_shell(pipe_read: int) -> None:
    """In the child, before exec: terminal modes, and the command pipe at its number."""
    prepare()
    make_plain(0)
    os.dup2(pipe_read, COMMAND_FD)
    os.close(pipe_read)


def start_light(message: dict[str, Any], pipe_read: int, rows: int, columns: int) -> tuple[int, int]:
    """Start a shell on a terminal of its own without forking this process.

    It may fork nothing before its first command: that would miss its limits.

    What a fork of Python costs the child before its exec is several times a bash's own start. What can be set only
    between fork and exec is left out: it is hung up, not killed, when the worker and the spawner are gone.

    Args:
        message: argv, env and cwd.
        pipe_read: read end of its command pipe.
        rows: of its terminal.
        columns: of its terminal.

    Returns:
        Its process id, and the terminal's master.

    Raises:
        OSError: it could not be started.
    """
    wanted = message["argv"][0], message["env"].get("PATH")
    program = _found(*wanted)
    if program is None or not os.access(program, os.X_OK):  # what was not there may be there now, and the other way
        _found.cache_clear()
        program = _found(*wanted)
    if program is None:
        raise FileNotFoundError(f"The command was not found or was not executable: {message['argv'][0]}.")
    master, terminal = os.openpty()
    umask = os.umask(0o022)
    try:
        make_plain(terminal)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.chdir(message["cwd"])
        pid = os.posix_spawn(
            program, message["argv"], message["env"], setsid=True, setsigdef=_DEFAULTS,
            file_actions=(
                (os.POSIX_SPAWN_OPEN, 0, os.ttyname(terminal), os.O_RDWR, 0),  # which makes it its controlling one
                (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2), (os.POSIX_SPAWN_DUP2, pipe_read, COMMAND_FD),
            ),
        )  # fmt: skip
    except BaseException:  # nobody holds it; raised again
        os.close(master)
        raise
    finally:
        os.close(terminal)
        os.umask(umask)
        os.chdir("/")
    for kind, value in LIMITS.items():
        resource.prlimit(pid, kind, _allowed(kind, value))
    _go_first(pid)
    return pid, master


def prepare() -> None:
    """In any child, before exec: it dies with the spawner; umask and signals are as a program expects them."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.umask(0o022)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, *WORKERS_SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    for kind, value in LIMITS.items():
        limit(kind, value)
    _go_first("self")
    if _IN_SLURM_JOB:  # its warning may go to every process below a task, and would end what an agent runs
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def limit(kind: int, value: int) -> None:
    """At most this, and no more than is allowed already."""
    resource.setrlimit(kind, _allowed(kind, value))


def _allowed(kind: int, value: int) -> tuple[int, int]:
    hard = _hard_limit(kind)
    allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
    return allowed, allowed


@functools.lru_cache(maxsize=64)
def _found(program: str, path: str | None) -> str | None:
    return shutil.which(program, path=path)


@functools.cache
def _hard_limit(kind: int) -> int:
    """What this process may have at most; nobody changes that for the spawner."""
    return resource.getrlimit(kind)[1]


def _go_first(pid: int | str) -> None:
    """Where memory runs out, these go before the worker and the node's other jobs."""
    with contextlib.suppress(OSError):
        descriptor = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"1000")
        finally:
            os.close(descriptor)


def become(message: dict[str, Any], descriptors: tuple[int, int, int]) -> NoReturn:
    """In the forked child: the program that was asked for, in a session of its own; never returns.

    Args:
        message: argv, env and cwd.
        descriptors: what becomes its input, its output (both kinds) and its report.
    """
    os.setsid()
    prepare()
    given, output, report = descriptors
    for descriptor, number in ((given, 0), (output, 1), (output, 2), (report, REPORT_FD)):
        os.dup2(descriptor, number)
    os.chdir(message["cwd"])
    os.execvpe(message["argv"][0], message["argv"], message["env"])  # noqa: S606 - no shell is wanted
