"""A process that has imported what a run's processes need, and forks them: `python -P -m launch.forkserver FD KINDS`.

Each process of a run would import the same modules for itself, which is most of what its start costs. Requests come
over a socket, one a packet; answered with the pid and a pidfd, and later with the exit code. It runs no thread and no
event loop, reads no configuration and holds no secret. Its end is the end of those that it has forked, as its own
parent's is its end: each gets the signal for which it asks in `launch.process`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from launch import process
from launch.forked import MODULES, PACKET
from launch.kinds import die_with_parent, supervised, supervisor

_DEAF_TO: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm sends them to every process of a step at once; whoever was forked here decides for itself."""
_ARGUMENTS: Final = slice(45, 47)
"""Where in /proc/PID/stat, from the state on, the place of the command line begins and ends."""


def main(argv: Sequence[str]) -> int:
    """Fork what is asked for until nobody can ask any more; in a fork, the exit code of the process that it became."""
    with socket.socket(fileno=int(argv[0])) as link:
        die_with_parent(signal.SIGKILL, supervisor())
        os.environ.update(supervised())  # this process starts the others
        signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF_TO)  # not ignored: a fork that is told at once to end hears it
        for name in (name for kind in argv[1].split(",") for name in MODULES[kind]):
            importlib.import_module(name)
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            return 1  # a thread holds locks that no fork would ever let go: whoever asks starts processes itself
        gc.collect()
        gc.freeze()  # else the first collection of a fork writes to every page that it shares with the others
        request = _serve(link)
    return 0 if request is None else _become(request)


def _serve(link: socket.socket) -> dict[str, object] | None:
    """None at the end of the requests; in a fork, what was asked for."""
    children: dict[int, int] = {}
    poll = select.poll()
    poll.register(link, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != link.fileno():
                poll.unregister(descriptor)
                os.close(descriptor)
                pid = children.pop(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                link.send(json.dumps({"exit": pid, "code": code}).encode())
                continue
            packet = link.recv(PACKET)
            if not packet:
                return None
            request: dict[str, object] = json.loads(packet)
            pid = os.fork()
            if pid == 0:
                for child in children:
                    os.close(child)
                return request
            child = os.pidfd_open(pid)
            children[child] = pid
            poll.register(child, select.POLLIN)
            socket.send_fds(link, [json.dumps({"id": request["id"], "pid": pid}).encode()], [child])


def _become(request: dict[str, object]) -> int:
    """Be the process that was asked for, as if it had been started by its own command line."""
    for number in _DEAF_TO:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _DEAF_TO)
    os.setsid()
    log, words = str(request["log"]), [str(word) for word in request["words"]]  # type: ignore[attr-defined]
    with _opened("/dev/null", os.O_RDONLY) as nothing, _opened(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as said:
        os.dup2(nothing, 0)
        os.dup2(said, 1)
        os.dup2(said, 2)
    with contextlib.suppress(OSError, ValueError):  # what it is called matters to people alone
        _rename([sys.executable, "-P", "-m", "launch.process", *words])
    return process.main(words)


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _rename(words: Sequence[str]) -> None:
    """Show this command line to who looks at the process; what is longer than the old one is cut."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_ARGUMENTS])
    text = "\0".join(words).encode()[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
