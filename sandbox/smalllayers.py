"""What layers come to that hold next to nothing, known to a worker's plain sandboxes: laid out at once, handed on."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sandbox.protocols import SandboxSpec

_SMALL_NAMES, _SMALL_BYTES = 16, 32 * 1024
"""What a stack of layers may come to that is laid out without a thread."""
_STACKS, _SPARES = 256, 256
_SET_BACK_NS = 60 * 10**9

State = bytes | tuple[tuple[int, ...], ...]
"""What a root was like at a time: two are equal where nothing was changed."""


class Laid(NamedTuple):
    """A directory (no content, and no times) or a file as layers have it; the path is relative."""

    path: str
    mode: int
    content: bytes | None
    times_ns: tuple[int, int]

    def lay(self, root: str) -> None:
        """Make it below `root`, which ends in a slash."""
        path = root + self.path
        if self.content is None:
            os.mkdir(path, 0o700)  # noqa: PTH102 - text is all there is
            os.chmod(path, self.mode)  # noqa: PTH101
            return
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if os.write(made, self.content) != len(self.content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            os.fchmod(made, self.mode)
            os.utime(made, ns=self.times_ns)
        finally:
            os.close(made)


class KnownLayers:
    """What stacks of layers come to that hold next to nothing, as most environments' do.

    To lay it out again takes a few system calls, less than the way to a thread and back. A stack is known by its
    layers' inodes, so that one that was taken away and made anew is looked at again. The directories that a sandbox
    left as they were are the next one's: to make and remove them costs more than all else that such a sandbox does
    with files, and ever more the more of them were removed lately (ext4 passes by inodes that were just freed).
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[str, int, int], ...], tuple[Laid, ...] | None] = {}
        self._spare: dict[tuple[Laid, ...], list[Spare]] = {}
        self._spares = 0

    def find(self, spec: SandboxSpec) -> tuple[Laid, ...] | None:
        """What a sandbox's layers come to, if that is known, or can be seen at once, and nothing lies over them."""
        if spec.upper is not None or spec.image != "host":
            return None
        try:
            named = _named(spec.layers)
            if named not in self._known and len(spec.layers) == 1:  # a group's rollouts begin together
                self._learn(named, Path(spec.layers[0]))
        except OSError:  # who copies them will say so
            return None
        return self._known.get(named)

    def learn(self, layers: Sequence[str], root: Path) -> None:
        """See what several layers have come to; nobody but us has touched `root` yet."""
        if len(layers) > 1:
            self._learn(_named(layers), root)

    def _learn(self, named: tuple[tuple[str, int, int], ...], root: Path) -> None:
        self._known[named] = _read_small(root)
        if len(self._known) > _STACKS:
            del self._known[next(iter(self._known))]

    def take(self, found: tuple[Laid, ...]) -> Spare | None:
        """A directory that was handed on and has all directories that a sandbox begins with, and nothing else."""
        spares = self._spare.get(_directories(found)) if self._spares else None
        if not spares:
            return None
        self._spares -= 1
        return spares.pop()

    @property
    def full(self) -> bool:
        """Whether no more directories are wanted."""
        return self._spares >= _SPARES

    def give(self, found: tuple[Laid, ...], spare: Spare) -> None:
        """Hand a directory on that is as it was laid out."""
        for one in found:
            if one.content is not None:
                os.unlink(f"{spare.directory}/root/{one.path}")  # noqa: PTH108 - text is all there is
                spare = Spare(spare.directory, None)
        self._spare.setdefault(_directories(found), []).append(spare)
        self._spares += 1


class Spare(NamedTuple):
    """A sandbox's directory without a sandbox, and the state of its root where nothing was taken from there."""

    directory: Path
    began: State | None


def _directories(entries: tuple[Laid, ...]) -> tuple[Laid, ...]:
    return tuple(one for one in entries if one.content is None)


def _named(layers: Sequence[str]) -> tuple[tuple[str, int, int], ...]:
    stats = [(layer, os.stat(layer)) for layer in layers]  # noqa: PTH116 - text is all there is
    return tuple((layer, status.st_ino, status.st_ctime_ns) for layer, status in stats)


def _read_small(root: Path) -> tuple[Laid, ...] | None:
    """A directory's entries, parents first; None where they are many, large, or neither directories nor plain files."""
    entries: list[Laid] = []
    pending, left = [""], _SMALL_BYTES
    for inside in pending:  # which grows meanwhile
        with os.scandir(f"{root}/{inside}") as names:
            for name in names:
                status, path = name.stat(follow_symlinks=False), inside + name.name
                mode, content = stat.S_IMODE(status.st_mode), None
                if stat.S_ISDIR(status.st_mode) and mode & 0o700 == 0o700:
                    pending.append(f"{path}/")
                elif stat.S_ISREG(status.st_mode) and mode & 0o400 and status.st_nlink == 1 and status.st_size <= left:
                    content = Path(name.path).read_bytes()
                    left -= len(content)
                else:
                    return None
                times_ns = (0, 0) if content is None else (status.st_atime_ns, status.st_mtime_ns)
                entries.append(Laid(path, mode, content, times_ns))
                if len(entries) > _SMALL_NAMES:
                    return None
    return tuple(entries)


def facts(of: os.stat_result) -> tuple[int, ...]:
    """What a change of an inode changes; the time of change is what its owner cannot set."""
    return (of.st_ino, of.st_mode, of.st_size, of.st_nlink, of.st_mtime_ns, of.st_ctime_ns)


def outline(root: Path, entries: tuple[Laid, ...]) -> State | None:
    """The state of a root that was set back, from its own names alone: their times tell what came and went in them."""
    at = f"{root}/"
    try:
        return tuple(facts(os.lstat(at + path)) for path in ("", *(one.path for one in entries)))
    except OSError:
        return None


def set_back(root: Path, entries: tuple[Laid, ...]) -> None:
    """Give directories a time of writing before any change to come, which may be in one tick of the clock with them."""
    earlier = time.time_ns() - _SET_BACK_NS
    for path in ("", *(one.path for one in _directories(entries))):
        os.utime(f"{root}/{path}", ns=(earlier, earlier))
