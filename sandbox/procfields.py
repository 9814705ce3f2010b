"""What /proc says of one process and of this boot: the fields of its stat line, and the boot's identity."""

# Next to nothing is imported here: the spawner process reaches this file too, and must start fast.

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress

STATE, PARENT, UTIME, THREADS, STARTED, RESIDENT, ENVIRONMENT_END = 0, 1, 11, 17, 19, 21, 48
"""Places in `stat_fields`: proc(5) counts from 1 and has two fields before these."""

_LOOKS, _LOOK_EVERY_S = 50, 0.001


def stat_fields(pid: int | str) -> list[bytes]:
    """The fields of /proc/PID/stat behind the name of the command, which may hold anything.

    Raises:
        OSError: the process is gone.
    """
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        return file.read(1024).rpartition(b")")[2].split()


def boot_id() -> str:
    """Of this boot of this kernel; empty where it does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def children_of(pid: int) -> list[int]:
    """Process ids of the direct children; empty when the process is gone."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - a child stands with the thread that forked it
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
        return found
    except OSError:
        found.clear()
    for other in [int(name) for name in os.listdir("/proc") if name.isdigit()]:  # noqa: PTH208
        with suppress(OSError, ValueError, IndexError):
            if int(stat_fields(other)[PARENT]) == pid:
                found.append(other)
    return found


def own_children() -> list[int]:
    """As `children_of` this process, which has no other thread."""
    try:
        return [int(pid) for pid in _read("/proc/thread-self/children").split()]
    except OSError:
        return children_of(os.getpid())


def carriers_of(token: str, roots: Iterable[int]) -> list[int]:
    """Which of these processes and their descendants had `token` (NAME=value) in their environment at start.

    One that is amid an exec shows none: it is looked at again until it is through.
    """
    wanted = b"\0" + token.encode() + b"\0"
    found, pending = [], list(roots)
    while pending:
        pid = pending.pop()
        pending += children_of(pid)
        with suppress(OSError):
            if wanted in b"\0" + _environment(pid):
                found.append(pid)
    return found


def _environment(pid: int) -> bytes:
    for _ in range(_LOOKS):
        data = _read(f"/proc/{pid}/environ")
        if data or (fields := stat_fields(pid))[STATE] in b"ZX" or fields[ENVIRONMENT_END] != b"0":
            break
        time.sleep(_LOOK_EVERY_S)
    return data


def _read(path: str) -> bytes:
    """A file of /proc, whole, in the fewest system calls: this is done several times for every shell that ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = part = os.read(descriptor, 65536)
        while part:
            part = os.read(descriptor, 65536)
            data += part
        return data
    finally:
        os.close(descriptor)
