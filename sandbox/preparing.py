"""What a child of the spawner does between its fork and its exec: signals, limits, descriptors, and what it becomes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
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
_libc = ctypes.CDLL(None, use_errno=True)


def prepare_shell(pipe_read: int) -> None:
    """In the child, before exec: terminal modes, and the command pipe at its number."""
    prepare()
    make_plain(0)
    os.dup2(pipe_read, COMMAND_FD)
    os.close(pipe_read)


def prepare() -> None:
    """In any child, before exec: it dies with the spawner; umask and signals are as a program expects them."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.umask(0o022)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, *WORKERS_SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    for kind, value in LIMITS.items():
        limit(kind, value)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # where memory runs out, these go before the worker and the node's other jobs
    if _IN_SLURM_JOB:  # its warning may go to every process below a task, and would end what an agent runs
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def limit(kind: int, value: int) -> None:
    """At most this, and no more than is allowed already."""
    hard = resource.getrlimit(kind)[1]
    allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (allowed, allowed))


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
