"""What a hostile workspace layer may change and what not: protected paths stay as the layers below have them.

A layer of overlayfs hides in more ways than by a file of the same name: a whiteout or an opaque directory hides a whole
tree, a link or a file in a directory's place all that was in it, a link above a path leads it elsewhere. So the layer
is held against the directories below it, and whatever would hide, replace or redirect a protected path is taken out or
spelled out: what else it hid becomes single whiteouts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import LayerError
from sandbox.scratch import remove_tree
from sandbox.selection import Selection
from sandbox.uppertree import OPAQUE_XATTR

_GLOB = frozenset("*?[")
_MODE = 0o755

Parts = tuple[bytes, ...]


@dataclass(frozen=True)
class Lower:
    """A directory as a stack of layers shows it.

    Args:
        directories: that make it up, highest first; opened anew for each look, nothing in them moves.
    """

    directories: tuple[Path, ...]

    def names(self) -> Iterator[bytes]:
        """What the stack shows in it."""
        seen: set[bytes] = set()
        for directory in self.directories:
            seen.update(os.listdir(os.fsencode(directory)))  # noqa: PTH208 - bytes
        return (name for name in sorted(seen) if self.look(name) is not None)

    def look(self, name: bytes) -> Lower | bool | None:
        """The directory of that name, True for anything else that is there, None for nothing."""
        found: list[Path] = []
        for directory in self.directories:
            path = directory / os.fsdecode(name)
            try:
                status = path.lstat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            if _is_whiteout(status):
                break
            if not stat.S_ISDIR(status.st_mode):
                return Lower(tuple(found)) if found else True
            found.append(path)
            if _is_opaque(path):
                break
        return Lower(tuple(found)) if found else None


class Protection:
    """The paths that a workspace layer must leave alone.

    Args:
        workspace: absolute paths whose changes are taken at all; each stays a directory.
        protected: globs as of `Sandbox.pack`; also directories, with all that is in them.
    """

    def __init__(self, workspace: Sequence[str], protected: Sequence[str]) -> None:
        self._taken = Selection(workspace, protected)
        self._globs = Selection(("/",), protected)
        fixed = [_fixed(glob) for glob in protected if "/" in glob]
        roots = [_split(path) for path in workspace]
        self._directories = {way[:count] for way in fixed for count in range(1, len(way))}
        self._directories |= {way[:count] for way in roots for count in range(1, len(way) + 1)}

    def apply(self, layer: Path, lowers: Sequence[Path]) -> None:
        """Mend an unpacked layer in place.

        Args:
            layer: in overlay format; nobody else uses it.
            lowers: what it will be stacked on, lowest first.

        Raises:
            LayerError: it cannot be read or changed.
        """
        try:
            self._mend(layer, (), Lower(tuple(reversed(lowers))))
        except OSError as error:
            raise LayerError(f"the workspace cannot be held against its layers: {error}", boundary="layers") from error

    def _mend(self, directory: Path, path: Parts, below: Lower | None) -> None:
        """Mend what a directory of the layer holds; `below` is what it is merged with, None where with nothing."""
        for name in sorted(os.listdir(os.fsencode(directory))):  # noqa: PTH208 - bytes
            here, there = (*path, name), directory / os.fsdecode(name)
            if self._taken.verdict(here) == "leave":
                _remove(there)
                continue
            under = below.look(name) if below is not None else None
            lower = under if isinstance(under, Lower) else None
            status = there.lstat()
            if not stat.S_ISDIR(status.st_mode):
                if not self._must_stay(here, lower):
                    _let_read(there, status)
                    continue
                _remove(there)
                there.mkdir(mode=_MODE)
                there.chmod(_MODE)
                if lower is not None:
                    self._hide(there, here, lower)
                continue
            # A directory that even its owner may not enter would keep the trusted side out as well.
            there.chmod(stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
            if _is_opaque(there) and lower is not None and self._must_stay(here, lower):
                os.removexattr(there, OPAQUE_XATTR)
                self._hide(there, here, lower)
            self._mend(there, here, None if _is_opaque(there) else lower)

    def _must_stay(self, path: Parts, lower: Lower | None) -> bool:
        """The path has to be a directory that shows what is protected in it."""
        return path in self._directories or (lower is not None and self._holds(path, lower))

    def _holds(self, path: Parts, lower: Lower) -> bool:
        """A protected path lies below."""
        for name in lower.names():
            here = (*path, name)
            if self._globs.verdict(here) == "leave":
                return True
            under = lower.look(name)
            if isinstance(under, Lower) and self._holds(here, under):
                return True
        return False

    def _hide(self, directory: Path, path: Parts, lower: Lower) -> None:
        """Hide in a directory of the layer all of the lower one but what is protected."""
        for name in lower.names():
            here, there = (*path, name), directory / os.fsdecode(name)
            if self._globs.verdict(here) == "leave":
                continue
            under = lower.look(name)
            if not os.path.lexists(there):
                if not (isinstance(under, Lower) and self._must_stay(here, under)):
                    os.mknod(there, stat.S_IFCHR | 0o600, 0)
                    continue
                there.mkdir(mode=_MODE)
                there.chmod(_MODE)
            if not isinstance(under, Lower) or not stat.S_ISDIR(there.lstat().st_mode):
                continue  # what takes a directory's place is mended on the way down
            with suppress(OSError):
                os.removexattr(there, OPAQUE_XATTR)
            self._hide(there, here, under)


def _split(path: str) -> Parts:
    return tuple(part for part in os.fsencode(path).split(b"/") if part)


def _fixed(glob: str) -> Parts:
    """The parts of a glob that stand for one path: those before its first wildcard, and its last name."""
    parts = [part for part in glob.split("/") if part]
    fixed = 0
    while fixed < len(parts) and not _GLOB & set(parts[fixed]):
        fixed += 1
    return tuple(os.fsencode(part) for part in parts[: fixed + 1])


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _is_opaque(directory: Path) -> bool:
    try:
        return os.getxattr(directory, OPAQUE_XATTR, follow_symlinks=False) in (b"y", b"x")
    except OSError:
        return False


def _let_read(path: Path, status: os.stat_result) -> None:
    """The trusted side has no more rights over a file than its owner: what the owner may not read, it may not."""
    if stat.S_ISREG(status.st_mode) and not status.st_mode & stat.S_IRUSR:
        path.chmod(stat.S_IMODE(status.st_mode) | stat.S_IRUSR)


def _remove(path: Path) -> None:
    if stat.S_ISDIR(path.lstat().st_mode):
        remove_tree(path)
    else:
        path.unlink()
