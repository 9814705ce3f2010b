"""What /proc says of one process and of this boot: the fields of its stat line, and the boot's identity."""

# Nothing is imported here: the spawner process reaches this file too, and must start fast.

from __future__ import annotations

PARENT, UTIME, THREADS, STARTED, RESIDENT = 1, 11, 17, 19, 21
"""Places in `stat_fields`: proc(5) counts from 1 and has two fields before these."""


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
