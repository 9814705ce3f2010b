"""Walks the upper directories of overlays in the layer's order and yields what changed, as entries of the layer."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.errors import LayerError
from sandbox.selection import Selection
from sandbox.tarstream import Entry

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
OPAQUE_XATTR = "user.overlay.opaque"
MAX_DEPTH = 256
MAX_PATH = 3072
"""Bytes of a directory's path: with the place where a layer is unpacked it must stay below the kernel's 4096."""
_PLAIN_MODE = 0o755
MOVED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)  # something in the sandbox moved it meanwhile


def refuse_deep(path: bytes) -> None:
    """Refuse a directory that no layer can hold.

    Args:
        path: relative to the root.

    Raises:
        LayerError: it is too deep, or too long.
    """
    if path.count(b"/") >= MAX_DEPTH or len(path) > MAX_PATH:
        raise LayerError(
            f"directories are nested deeper than {MAX_DEPTH}, or by more than {MAX_PATH} bytes of path",
            boundary="layers", content=True,
        )  # fmt: skip


@dataclass
class UpperWalk:
    """One walk over the changes of a sandbox.

    Directories are opened one by one and never by a path through the tree, so no link that an agent left is followed.
    Setuid and setgid bits are dropped (no sandbox honours them), extended attributes too; sockets, FIFOs, devices and
    names that would read as whiteouts are counted and left out.

    Args:
        trees: mount point relative to the root (b"" for the root itself) -> upper directory.
        selection: what is taken.
    """

    trees: Mapping[bytes, Path]
    selection: Selection
    skipped: int = 0
    _links: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def entries(self) -> Iterator[tuple[Entry, int]]:
        """Each entry with a descriptor of its content, open until the next one is asked for; -1 without content.

        Raises:
            LayerError: the tree is too deep, or something in it cannot be read.
        """
        try:
            with _directory(self.trees[b""]) as root:
                yield from self._directory(root, (), opaque_above=False)
        except OSError as error:
            raise LayerError(
                f"the changes cannot be read: {error.strerror} at {error.filename!r}", boundary="layers",
                content=error.errno in MOVED,
            ) from error  # fmt: skip

    def _directory(self, directory: int, path: tuple[bytes, ...], opaque_above: bool) -> Iterator[tuple[Entry, int]]:
        refuse_deep(b"/".join(path))
        names = {os.fsencode(name) for name in os.listdir(directory)}
        names |= {point for point in self.trees if point and not path}  # a mount point need not be in the root's upper
        missing = set()
        if path and self.selection.verdict(path) == "way":
            missing = {name for name in self.selection.next_parts(path) if opaque_above and name not in names}
        for name in sorted(names | missing):
            here = (*path, name)
            verdict = self.selection.verdict(here)
            if verdict == "leave":
                continue
            if name.startswith(WHITEOUT):
                self.skipped += 1
            elif name in missing:
                yield _whiteout(here), -1
            elif not path and name in self.trees:
                yield from self._mounted(self.trees[name], here)
            elif verdict == "way":
                yield from self._way(directory, here, opaque_above)
            else:
                yield from self._taken(directory, here, opaque_above and self.selection.is_start(here))

    def _mounted(self, tree: Path, here: tuple[bytes, ...]) -> Iterator[tuple[Entry, int]]:
        """What another overlay, mounted in the root, holds; nothing where nothing changed there."""
        with _directory(tree) as inner:
            first = True
            for entry in self._directory(inner, here, opaque_above=False):
                if first:
                    yield Entry(b"/".join(here), "directory", _PLAIN_MODE), -1
                    first = False
                yield entry

    def _way(self, directory: int, here: tuple[bytes, ...], opaque_above: bool) -> Iterator[tuple[Entry, int]]:
        """A directory above a declared path: only what leads there; without it the declared path is gone."""
        name, path = here[-1], b"/".join(here)
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            yield Entry(path, "directory", _PLAIN_MODE), -1
            for part in self.selection.next_parts(here):
                yield _whiteout((*here, part)), -1
            return
        with _directory(name, directory) as inner:
            yield Entry(path, "directory", _mode(status)), -1
            yield from self._directory(inner, here, opaque_above or is_opaque(inner))

    def _taken(self, directory: int, here: tuple[bytes, ...], opaque: bool) -> Iterator[tuple[Entry, int]]:
        name, path = here[-1], b"/".join(here)
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            with _directory(name, directory) as inner:
                yield Entry(path, "directory", _mode(status)), -1
                if opaque or is_opaque(inner):
                    yield Entry(path + b"/" + OPAQUE, "file"), -1
                yield from self._directory(inner, here, opaque_above=False)
        elif stat.S_ISREG(status.st_mode):
            yield from self._file(directory, name, path, status)
        elif stat.S_ISLNK(status.st_mode):
            yield Entry(path, "symlink", 0o777, 0, os.readlink(name, dir_fd=directory)), -1
        elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            yield _whiteout(here), -1
        else:
            self.skipped += 1

    def _file(self, directory: int, name: bytes, path: bytes, status: os.stat_result) -> Iterator[tuple[Entry, int]]:
        if status.st_nlink > 1:
            first = self._links.setdefault((status.st_dev, status.st_ino), path)
            if first != path:
                yield Entry(path, "hardlink", _mode(status), 0, first), -1
                return
        with _readable(name, os.O_RDONLY, 0o400, directory) as content:
            yield Entry(path, "file", _mode(status), os.fstat(content).st_size), content


def _whiteout(here: tuple[bytes, ...]) -> Entry:
    return Entry(b"/".join((*here[:-1], WHITEOUT + here[-1])), "file")


def _mode(status: os.stat_result) -> int:
    return status.st_mode & 0o1777


def is_opaque(directory: int) -> bool:
    """Whether an open directory hides what lies below it."""
    with suppress(OSError):
        return os.getxattr(directory, OPAQUE_XATTR) in (b"y", b"x")
    return False


def opened(
    name: bytes | Path, *, within: int | None = None, directory: bool = False, status: os.stat_result | None = None
) -> AbstractContextManager[int]:
    """A file or directory of a layer open for reading, whatever its mode; no link is followed.

    Args:
        name: a path, or a name in the open directory `within`.
        within: see `name`.
        directory: it must be one.
        status: of what was found there before; something else that has the name now is refused.
    """
    flags, needed = (os.O_RDONLY | os.O_DIRECTORY, 0o500) if directory else (os.O_RDONLY, 0o400)
    return _readable(name, flags, needed, within, status)


def _directory(name: bytes | Path, within: int | None = None) -> AbstractContextManager[int]:
    return _readable(name, os.O_RDONLY | os.O_DIRECTORY, 0o500, within)


@contextmanager
def _readable(
    name: bytes | Path, flags: int, needed: int, within: int | None, found: os.stat_result | None = None
) -> Iterator[int]:
    """Open without following a link; a permission that the owner lacks is given meanwhile and taken back."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    way = f"/proc/self/fd/{handle}"
    status = os.fstat(handle)
    mode = stat.S_IMODE(status.st_mode)
    lacking = mode & needed != needed
    try:
        if found is not None and (status.st_dev, status.st_ino) != (found.st_dev, found.st_ino):
            raise OSError(errno.ENOENT, "it was replaced while it was read", name)
        if lacking:
            os.chmod(way, mode | needed)  # noqa: PTH101 - a descriptor's own path: no link can come between
        opened = os.open(way, flags | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield opened
        finally:
            os.close(opened)
    finally:
        if lacking:
            os.chmod(way, mode)  # noqa: PTH101
        os.close(handle)
