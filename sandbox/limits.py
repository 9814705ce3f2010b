"""What one sandbox may use of its node, and what of that the kernel alone holds as resource limits. Pure."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Final

import msgspec

MIB: Final = 1024 * 1024
ROOM: Final = 2
"""Times `memory_mib` that one process may map: what is mapped and never touched is no use of memory."""

_LAUNCHERS: Final = 12
"""Processes of a backend's own that are counted with a sandbox's, at most."""


class Bounds(msgspec.Struct, frozen=True):
    """Bounds of one sandbox, all its processes together where nothing else is said; None: unbounded.

    Args:
        cpu_s: CPU seconds.
        memory_mib: memory in use; what processes share is counted once.
        processes: processes and threads at once.
        disk_mib: what it has written and not removed, files that are removed but still open included.
        files: names that it has made.
        file_mib: one file; None: as large as `disk_mib` allows.
        open_files: descriptors of one process.
        wall_s: seconds from its start.
    """

    cpu_s: float | None = None
    memory_mib: int | None = None
    processes: int | None = None
    disk_mib: int | None = None
    files: int | None = None
    file_mib: int | None = None
    open_files: int | None = None
    wall_s: float | None = None

    @property
    def watched(self) -> bool:
        """Whether any of them needs somebody to look: the kernel holds the rest by itself."""
        watched = (self.cpu_s, self.memory_mib, self.processes, self.disk_mib, self.files, self.wall_s)
        return any(one is not None for one in watched)


UNBOUNDED: Final = Bounds()


class Usage(msgspec.Struct, frozen=True):
    """What a sandbox uses, in the units of `Bounds` but for bytes; None: not looked at this time."""

    cpu_s: float = 0.0
    memory_bytes: int = 0
    processes: int = 0
    disk_bytes: int | None = None
    files: int | None = None
    wall_s: float = 0.0


class Excess(msgspec.Struct, frozen=True):
    """A bound that was passed: its name, what was measured and what is allowed, in the bound's unit."""

    limit: str
    measured: float
    allowed: float


def excess(bounds: Bounds, usage: Usage) -> Excess | None:
    """The first bound that is passed, or None."""
    pairs = (
        ("processes", usage.processes, bounds.processes),
        ("memory_mib", usage.memory_bytes / MIB, bounds.memory_mib),
        ("disk_mib", None if usage.disk_bytes is None else usage.disk_bytes / MIB, bounds.disk_mib),
        ("files", usage.files, bounds.files),
        ("cpu_s", usage.cpu_s, bounds.cpu_s),
        ("wall_s", usage.wall_s, bounds.wall_s),
    )
    for name, measured, allowed in pairs:
        if measured is not None and allowed is not None and measured > allowed:
            return Excess(name, round(float(measured), 1), float(allowed))
    return None


def resource_limits(bounds: Bounds) -> Mapping[int, int]:
    """Kind of resource limit -> value, for every process that is started for a sandbox; each holds for one process."""
    file_mib = bounds.file_mib if bounds.file_mib is not None else bounds.disk_mib
    limits = {resource.RLIMIT_CORE: 0}
    if file_mib is not None:
        limits[resource.RLIMIT_FSIZE] = file_mib * MIB
    if bounds.memory_mib is not None:
        limits[resource.RLIMIT_DATA] = ROOM * bounds.memory_mib * MIB
    if bounds.open_files is not None:
        limits[resource.RLIMIT_NOFILE] = bounds.open_files
    if bounds.cpu_s is not None:
        limits[resource.RLIMIT_CPU] = int(bounds.cpu_s) + 1
    return limits


def most_processes(bounds: Bounds, release: str) -> int | None:
    """What the kernel lets a sandbox have at once, as RLIMIT_NPROC inside; None where it cannot hold that.

    A little more than the bound: it holds a fork bomb until the watchdog looks, which then sees that the bound is
    passed and ends the sandbox by the limit's name, whoever runs it and however many launchers the kernel counts.

    Args:
        bounds: of the sandbox.
        release: as `uname -r` prints it.
    """
    if bounds.processes is None or not counts_by_namespace(release):
        return None
    return bounds.processes + max(_LAUNCHERS, bounds.processes // 8)


def counts_by_namespace(release: str) -> bool:
    """Whether a kernel counts processes against RLIMIT_NPROC by user namespace (Linux >= 5.14), not by user alone.

    Before, the limit of one sandbox would be met by all that its user runs on the node.

    Args:
        release: as `uname -r` prints it.
    """
    numbers = [int("".join(filter(str.isdigit, part)) or 0) for part in release.split("-")[0].split(".")[:2]]
    return tuple(numbers) >= (5, 14)
