"""Processes that outlived their worker: known by the identity that they carry, never by a name.

A worker is named by the boot, its process id and the moment of its start, which no other process ever shares. Its
spawner and the outermost process of each of its sandboxes carry that name in their environment. Whoever finds the
worker dead ends what carries its name, through a descriptor of the very process that was looked at.
"""

# Few imports of the standard library alone: the spawner process reaches this file too, and must start fast.

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

from sandbox.procfields import STARTED, boot_id, stat_fields

VARIABLE = "ROLLMILL_WORKER"
OWNER = ".owner"
"""File in an owned directory that holds its owner's name."""
_GONE_S = 5.0


def identity() -> str:
    """This process's name: boot, process namespace, process id, start in clock ticks since the boot."""
    return f"{boot_id()}.{_namespace()}.{os.getpid()}.{_started(os.getpid())}"


def lives(name: str) -> bool:
    """Whether the process of that name runs, as far as this one can see."""
    boot, namespace, pid, started = (name.split(".") + [""] * 4)[:4]
    if (boot, namespace) != (boot_id(), _namespace()) or not pid.isdigit():
        return False
    return _started(int(pid)) == started


def end_carriers(name: str) -> int:
    """SIGKILL every process of this user that carries a dead worker's name, and wait until they are gone.

    Returns:
        How many there were.
    """
    if not name or lives(name):
        return 0
    wanted = f"\0{VARIABLE}={name}\0".encode()
    ended = []
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names are all that is wanted
        if entry.isdigit() and int(entry) != os.getpid():
            with suppress(OSError):
                ended += _end(int(entry), wanted)
    deadline = time.monotonic() + _GONE_S
    for descriptor in ended:
        select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        os.close(descriptor)
    return len(ended)


def _end(pid: int, wanted: bytes) -> list[int]:
    """Kill it where it carries the name; its descriptor, which becomes readable when it is gone."""
    if not _carries(pid, wanted):
        return []
    descriptor = os.pidfd_open(pid)
    try:
        if _carries(pid, wanted):  # still the process that the descriptor means
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            return [descriptor]
    except BaseException:  # whatever kept the signal back, the descriptor goes; raised again
        os.close(descriptor)
        raise
    os.close(descriptor)
    return []


def _carries(pid: int, wanted: bytes) -> bool:
    return wanted in b"\0" + Path(f"/proc/{pid}/environ").read_bytes() + b"\0"


def _started(pid: int) -> str:
    with suppress(OSError, IndexError):
        return stat_fields(pid)[STARTED].decode()
    return ""


def _namespace() -> str:
    with suppress(OSError):
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    return ""
