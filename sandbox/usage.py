"""What sandboxes use, read from /proc and from the directories that they write to. Blocking; called in a thread."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from sandbox.procfields import PARENT, RESIDENT, THREADS, UTIME, stat_fields

T = TypeVar("T")

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEEPEST = 400
"""Directories in each other; each costs a descriptor while the look lasts, and no honest tree goes there."""
_BLOCK = 512
STAGE = "stage"
"""How the names of directories begin, right in a sandbox's own, in which a pack's changes are put together."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process as /proc/PID/stat shows it; `cpu_s` with the time of the children that it has waited for."""

    parent: int
    cpu_s: float
    threads: int
    resident_bytes: int
    own_s: float = 0.0


def processes() -> dict[int, Process]:
    """All processes of this node that are visible, some 15 us each."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - of four times the price
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                fields = stat_fields(name)
                user, system, *waited_for = map(int, fields[UTIME : UTIME + 4])
                own, resident = (user + system) / _TICKS, int(fields[RESIDENT]) * _PAGE
                cpu = own + sum(waited_for) / _TICKS
                found[int(name)] = Process(int(fields[PARENT]), cpu, int(fields[THREADS]), resident, own)
    return found


def families(table: Mapping[int, Process], roots: Iterable[int]) -> dict[int, list[int]]:
    """Root -> itself and all its descendants, of those that are in the table.

    An orphan of a process namespace becomes a child of that namespace's first process, so it stays in its family.
    """
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found = {}
    for root in roots:
        members, frontier = [], [root] if root in table else []
        while frontier:
            pid = frontier.pop()
            members.append(pid)
            frontier += children.get(pid, ())
        found[root] = members
    return found


def shared_once(pids: Iterable[int], table: Mapping[int, Process]) -> int:
    """Bytes in memory of processes, what they share counted once; resident size of those that do not tell.

    Costs up to milliseconds a process: for when the sum of the resident sizes is too much.
    """
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            words = {line.split()[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
            total += 1024 * (words["Pss:"] + words.get("SwapPss:", 0))
        except (OSError, ValueError, IndexError, KeyError):
            with suppress(OSError):
                Path(f"/proc/{pid}").stat()
                total += table[pid].resident_bytes
    return total


def removed_but_open(pids: Iterable[int], device: int) -> tuple[int, int]:
    """Bytes of files without a name that processes hold open: on filesystems, and in memory.

    Args:
        pids: of one sandbox.
        device: of an ordinary memory filesystem's anonymous files (see `memory_device`).
    """
    seen: set[tuple[int, int]] = set()
    disk = memory = 0
    for pid in pids:
        with suppress(OSError):
            for opened in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    found = opened.stat()
                    key = (found.st_dev, found.st_ino)
                    if found.st_nlink == 0 and stat.S_ISREG(found.st_mode) and key not in seen:
                        seen.add(key)
                        if found.st_dev == device:
                            memory += found.st_blocks * _BLOCK
                        else:
                            disk += found.st_blocks * _BLOCK
    return disk, memory


def shared_memory_bytes() -> int:
    """What all memory filesystems and anonymous files of this node hold; 0 where the kernel does not tell."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Shmem:")).split()[1])
    return 0


def memory_device() -> int:
    """The device number that files made by memfd_create have on this kernel."""
    descriptor = os.memfd_create("rollmill")
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


def written(directory: Path, most_bytes: int, most_names: int) -> tuple[int, int]:
    """Bytes and names below a sandbox's directory, plain files right in it and packs' stages left out: those are ours.

    Stops counting once either is passed, and where a tree is too deep: that counts as too many names. Holes weigh
    nothing, a file with two names weighs once. The agent changes the tree meanwhile, so no path is followed: each
    directory is opened in the one that it was seen in.
    """
    size = names = 0
    linked: set[int] = set()
    stack: list[tuple[int, Iterator[os.DirEntry[str]]]] = []
    try:
        _descend(stack, os.open(directory, _DIRECTORY))
        while stack and size <= most_bytes and names <= most_names:
            descriptor, entries = stack[-1]
            entry = next(entries, None)
            if entry is None:
                os.close(stack.pop()[0])
                continue
            with suppress(OSError):
                found = _reached(descriptor, partial(entry.stat, follow_symlinks=False))
                if len(stack) == 1 and entry.name.startswith(STAGE):
                    continue
                if stat.S_ISDIR(found.st_mode):
                    names += 1
                    if len(stack) >= _DEEPEST:
                        return size, most_names + 1
                    _descend(stack, _opened(descriptor, entry.name))
                elif len(stack) > 1:
                    names += 1
                    if found.st_nlink == 1 or found.st_ino not in linked:
                        size += found.st_blocks * _BLOCK
                    if found.st_nlink > 1:
                        linked.add(found.st_ino)
        return size, names
    finally:
        for descriptor, _ in stack:
            os.close(descriptor)


def _descend(stack: list[tuple[int, Iterator[os.DirEntry[str]]]], descriptor: int) -> None:
    try:
        stack.append((descriptor, os.scandir(descriptor)))
    except OSError:
        os.close(descriptor)
        raise


def _opened(parent: int, name: str) -> int:
    """A directory in another; one that is closed to its owner too has another mode for the moment of the opening."""
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        how = os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
        held = _reached(parent, partial(os.open, name, how, dir_fd=parent))
    try:
        there, mode = f"/proc/self/fd/{held}", stat.S_IMODE(os.fstat(held).st_mode)
        os.chmod(there, mode | 0o500)  # noqa: PTH101 - one inode, whatever its name leads to now
        try:
            return os.open(there, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            os.chmod(there, mode)  # noqa: PTH101 - likewise
    finally:
        os.close(held)


def _reached(directory: int, use: Callable[[], T]) -> T:
    """What `use` gives of a name in a directory; one that may not be searched has another mode for that moment."""
    try:
        return use()
    except PermissionError:
        mode = stat.S_IMODE(os.fstat(directory).st_mode)
        os.fchmod(directory, mode | 0o500)
        try:
            return use()
        finally:
            os.fchmod(directory, mode)
