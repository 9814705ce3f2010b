"""Layers without overlayfs: a stack merged into one plain directory or into one layer, and the way back to changes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.errors import LayerError
from sandbox.pristine import Pristine
from sandbox.scratch import remove_tree
from sandbox.uppertree import OPAQUE_XATTR, is_opaque, opened, refuse_deep

_COPY_BYTES = 1024 * 1024

Budget = Callable[[int], None]


def flatten(layers: Sequence[Path], target: Path, *, max_bytes: int | None = None) -> None:
    """Copy unpacked layers, lowest first, over the directory `target`, carrying out their deletions.

    Hard links within a layer stay links and holes stay holes; what the owner may not read is copied all the same.

    Args:
        layers: in overlay format; nobody else needs to leave them alone but for their content.
        target: a directory of ours.
        max_bytes: of files' content and names together (512 bytes each); None: no limit.

    Raises:
        LayerError: more than `max_bytes`, or a directory too deep for a layer.
        OSError: something cannot be read or written.
    """
    _Merge(os.fsencode(target), marks=False, spend=_budget(max_bytes)).add_all(layers)


def squash(layers: Sequence[Path], target: Path) -> None:
    """Merge unpacked layers, lowest first, into the new directory `target`: one layer that means what the stack meant.

    Deletions and opaque directories stay marked, for what lies below the lowest layer.

    Raises:
        OSError: something cannot be read or written.
    """
    target.mkdir(mode=0o700)
    _Merge(os.fsencode(target), marks=True, spend=_budget(None)).add_all(layers)


def changed(root: Path, pristine: Pristine, stage: Path) -> None:
    """Copy what changed in `root` since then to the new directory `stage`, in overlay format, removals as whiteouts."""
    stage.mkdir(mode=0o700)
    _Merge(os.fsencode(stage), marks=False, spend=_budget(None), pristine=pristine).add_all([root])


def changes(layers: Sequence[Path], root: Path, stage: Path) -> None:
    """Copy `root` to the new directory `stage` in overlay format: whiteouts stand for what the layers had and it lacks.

    What is unchanged is copied too: the layer is larger than an overlay's would be, and means the same.
    """
    stage.mkdir(mode=0o700)
    _Merge(os.fsencode(stage), marks=False, spend=_budget(None)).add_all([root])
    for layer in layers:
        with opened(layer, directory=True) as source:
            _hide_missing(source, os.fsencode(stage))


@dataclass
class _Merge:
    """Layers written over one directory; directories get their modes last, so that their owner may write in them."""

    target: bytes
    marks: bool
    spend: Budget
    pristine: Pristine | None = None
    _modes: dict[bytes, int] = field(default_factory=dict)
    _links: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def add_all(self, layers: Sequence[Path]) -> None:
        for layer in layers:
            self._links.clear()
            with opened(layer, directory=True) as source:
                self._into(source, self.target)
                self._modes[self.target] = stat.S_IMODE(os.fstat(source).st_mode)
        for path, mode in sorted(self._modes.items(), reverse=True):
            with suppress(FileNotFoundError, NotADirectoryError):
                if stat.S_ISDIR(os.lstat(path).st_mode):
                    os.chmod(path, mode)  # noqa: PTH101 - bytes

    def _into(self, source: int, target: bytes) -> None:
        refuse_deep(target[len(self.target) :].lstrip(b"/"))
        for entry in sorted(os.listdir(source)):
            name, there = os.fsencode(entry), target + b"/" + os.fsencode(entry)
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            self.spend(512)
            if stat.S_ISDIR(status.st_mode):
                with opened(name, within=source, directory=True, status=status) as inner:
                    self._directory(inner, there)
                    self._modes[there] = stat.S_IMODE(status.st_mode)
                self._leave_out(there, status)
                continue
            if self._is_as_it_was(there, status):
                continue
            self._remove(there)
            if stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink(name, dir_fd=source), there)  # noqa: PTH211 - bytes
                os.utime(there, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
            elif stat.S_ISREG(status.st_mode):
                self._file(source, name, status, there)
            elif self.marks and stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                os.mknod(there, stat.S_IFCHR, 0)
        if self.pristine is not None:
            for name in self.pristine.names(target[len(self.target) :]) - set(map(os.fsencode, os.listdir(source))):
                os.mknod(target + b"/" + name, stat.S_IFCHR, 0)

    def _is_as_it_was(self, there: bytes, status: os.stat_result) -> bool:
        return self.pristine is not None and self.pristine.has(there[len(self.target) :], status)

    def _leave_out(self, there: bytes, status: os.stat_result) -> None:
        """Take a directory away again that is as it was, with all that is in it."""
        if self._is_as_it_was(there, status):
            with suppress(OSError):  # something in it changed
                os.rmdir(there)  # noqa: PTH106 - bytes
                del self._modes[there]

    def _directory(self, source: int, there: bytes) -> None:
        old = _mode(there)
        if old is None or not stat.S_ISDIR(old) or is_opaque(source):
            hides = old is not None or is_opaque(source)
            self._remove(there)
            os.mkdir(there, 0o700)  # noqa: PTH102 - bytes
            if self.marks and hides:
                os.setxattr(there, OPAQUE_XATTR, b"y")
        else:
            os.chmod(there, 0o700)  # noqa: PTH101 - bytes
        self._into(source, there)

    def _file(self, source: int, name: bytes, status: os.stat_result, there: bytes) -> None:
        key = (status.st_dev, status.st_ino)
        if status.st_nlink > 1 and key in self._links:
            os.link(self._links[key], there, follow_symlinks=False)
            return
        self._links[key] = there
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with opened(name, within=source, status=status) as content:
            made = os.open(there, flags, 0o600)
            try:
                _copy(content, made, self.spend)
                os.fchmod(made, stat.S_IMODE(status.st_mode))
                os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))
            finally:
                os.close(made)

    def _remove(self, path: bytes) -> None:
        mode = _mode(path)
        if mode is None:
            return
        if stat.S_ISDIR(mode):
            remove_tree(Path(os.fsdecode(path)))
            inside = path + b"/"
            for gone in [one for one in self._modes if one == path or one.startswith(inside)]:
                del self._modes[gone]
        else:
            os.unlink(path)  # noqa: PTH108 - bytes


def _copy(source: int, target: int, spend: Budget) -> None:
    """Copy a file's content and leave its holes holes."""
    size, offset = os.fstat(source).st_size, 0
    while offset < size:
        try:
            offset = os.lseek(source, offset, os.SEEK_DATA)
        except OSError:  # nothing but a hole is left
            break
        end = os.lseek(source, offset, os.SEEK_HOLE)
        os.lseek(source, offset, os.SEEK_SET)
        os.lseek(target, offset, os.SEEK_SET)
        while offset < end and (chunk := os.read(source, min(_COPY_BYTES, end - offset))):
            spend(len(chunk))
            view = memoryview(chunk)
            while view:
                view = view[os.write(target, view) :]
            offset += len(chunk)
    os.ftruncate(target, size)


def _hide_missing(layer: int, there: bytes) -> None:
    """Mark in `there` what a directory of a layer has and it lacks."""
    for entry in os.listdir(layer):
        name, path = os.fsencode(entry), there + b"/" + os.fsencode(entry)
        status = os.stat(name, dir_fd=layer, follow_symlinks=False)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            continue
        mode, above = _mode(path), _mode(there)
        if mode is None:
            assert above is not None
            os.chmod(there, stat.S_IMODE(above) | 0o700)  # noqa: PTH101 - bytes
            os.mknod(path, stat.S_IFCHR, 0)
            os.chmod(there, stat.S_IMODE(above))  # noqa: PTH101 - bytes
        elif stat.S_ISDIR(status.st_mode) and stat.S_ISDIR(mode):
            os.chmod(path, stat.S_IMODE(mode) | 0o700)  # noqa: PTH101 - bytes
            with opened(name, within=layer, directory=True, status=status) as inner:
                _hide_missing(inner, path)
            os.chmod(path, stat.S_IMODE(mode))  # noqa: PTH101 - bytes


def _mode(path: bytes) -> int | None:
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return None


def _budget(most: int | None) -> Budget:
    left = most

    def spend(size: int) -> None:
        nonlocal left
        if left is None:
            return
        left -= size
        if left < 0:
            raise LayerError(
                f"the copy takes more than {most} bytes: use a backend with overlays, or raise the limit",
                boundary="layers",
            )

    return spend
