"""What a node keeps unpacked: images and layers by name under a quota, the least recently used leave, none in use."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from sandbox.errors import LayerError
from sandbox.scratch import remove_tree

_LOCK, _MAKING, _GONE = ".lock", ".making-", ".gone-"
_BLOCK = 512

log = logging.getLogger(__name__)


class Trimmed(msgspec.Struct, frozen=True):
    """What left a node: names and the bytes that they took."""

    names: list[str]
    size_bytes: int


class Held:
    """A directory that stays as long as this is not released; the kernel releases it when the process dies.

    Args:
        path: the directory.
        lock: descriptor of its lock file, locked shared.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    def release(self) -> None:
        """The holder needs it no longer; a second call does nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with suppress(OSError):
                os.utime(lock)
            os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class NodeCache:
    """Directories of one user on one node's own disk, shared by its processes. Calls block.

    Beside the directory NAME lies NAME.lock: shared while somebody uses the directory, exclusive while it is made or
    removed; its content is the directory's size in bytes, its time of change the last use.

    Args:
        root: made where missing, mode 700.
        quota_bytes: what all of it may take; None: half of the file system. What is in use stays above it too.
    """

    def __init__(self, root: Path, quota_bytes: int | None = None) -> None:
        self.root, self._quota = root, quota_bytes

    def prepare(self) -> None:
        """Make the directory."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """What is here."""
        with suppress(FileNotFoundError):
            return sorted(path.name for path in self.root.iterdir() if path.suffix != _LOCK and path.name[0] != ".")
        return []

    def hold(self, name: str, make: Callable[[Path], None], *, needs: int = 0) -> Held:
        """The directory of that name, made by one process while the others wait, held until it is released.

        Args:
            name: file name; the same name always means the same content.
            make: creates the directory that it is given, whole or not at all.
            needs: bytes that it is about to take; room is made before.

        Raises:
            LayerError: the disk has no room, even without all that is not in use.
        """
        self.prepare()
        directory, file = self.root / name, self.root / f"{name}{_LOCK}"
        while True:
            lock = _locked(file, fcntl.LOCK_SH)
            if lock is not None and directory.is_dir():
                os.utime(lock)
                return Held(directory, lock)
            if lock is not None:
                os.close(lock)
            lock = _locked(file, fcntl.LOCK_EX)
            if lock is None:
                continue
            try:
                if not directory.is_dir():
                    self._make(name, make, needs, lock)
            finally:
                os.close(lock)

    def trim(self, quota_bytes: int, *, needs: int = 0, dry_run: bool = False) -> Trimmed:
        """Remove the least recently used directories that nobody holds until all takes no more than the quota.

        Args:
            quota_bytes: see above.
            needs: bytes that must fit beside, into the quota and onto the disk.
            dry_run: only say what would go.
        """
        self._sweep()
        entries = sorted(self._entries())
        total = sum(size for _, _, size in entries)
        free = shutil.disk_usage(self.root).free if self.root.is_dir() else 0
        removed: list[str] = []
        gone = 0
        for used, name, size in entries:
            if total - gone + needs <= quota_bytes and free + gone >= needs:
                break
            if self._remove(name, used, dry_run=dry_run):
                removed.append(name)
                gone += size
        if not dry_run:
            self._sweep()
        return Trimmed(removed, gone)

    def _make(self, name: str, make: Callable[[Path], None], needs: int, lock: int) -> None:
        quota = shutil.disk_usage(self.root).total // 2 if self._quota is None else self._quota
        self.trim(quota, needs=needs)
        free = shutil.disk_usage(self.root).free
        if free < needs:
            raise LayerError(
                f"{self.root} has {free} bytes left and {name} needs {needs}: free some, or set cluster.scratch to a "
                "larger disk", boundary="layers",
            )  # fmt: skip
        stage = self.root / f"{_MAKING}{name}"
        remove_tree(stage)  # left by one that died: nobody else is here
        stage.mkdir(mode=0o700)
        try:
            make(stage / name)
            size = tree_bytes(stage / name)
            os.pwrite(lock, b"%d" % size, 0)
            (stage / name).rename(self.root / name)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise LayerError(f"{self.root} is full: {error.strerror}", boundary="layers") from error
        finally:
            remove_tree(stage)
        if size > needs and (left := self.trim(quota)).names:
            log.info("%s: %d directories left, %d bytes", self.root, len(left.names), left.size_bytes)

    def _entries(self) -> list[tuple[int, str, int]]:
        """Last use in nanoseconds, name and size of all that is here."""
        found = []
        for name in self.names():
            with suppress(FileNotFoundError, ValueError):
                file = self.root / f"{name}{_LOCK}"
                found.append((file.stat().st_mtime_ns, name, int(file.read_bytes() or b"0")))
        return found

    def _remove(self, name: str, used: int, *, dry_run: bool) -> bool:
        """Take a directory out of sight, if nobody uses it or has used it since."""
        file = self.root / f"{name}{_LOCK}"
        lock = _locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock is None:
            return False
        try:
            if os.fstat(lock).st_mtime_ns != used:
                return False
            if not dry_run:
                (self.root / name).rename(self.root / f"{_GONE}{name}-{os.urandom(6).hex()}")
                file.unlink()
            return True
        except FileNotFoundError:
            return False
        finally:
            os.close(lock)

    def _sweep(self) -> None:
        """Remove what is out of sight, and what a process that died was making."""
        if not self.root.is_dir():
            return
        for path in self.root.glob(f"{_GONE}*"):
            remove_tree(path)
        for path in self.root.glob(f"{_MAKING}*"):
            file = self.root / f"{path.name.removeprefix(_MAKING)}{_LOCK}"
            lock = _locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is not None:
                remove_tree(path)
                os.close(lock)


def tree_bytes(path: Path) -> int:
    """Bytes of disk that a directory takes; each file once, whatever its links."""
    seen: set[tuple[int, int]] = set()
    total = 0
    pending = [path]
    while pending:
        directory = pending.pop()
        with suppress(PermissionError), os.scandir(directory) as entries:  # a directory that its owner may not enter
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if status.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
                    if (status.st_dev, status.st_ino) in seen:
                        continue
                    seen.add((status.st_dev, status.st_ino))
                total += status.st_blocks * _BLOCK
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
    return total


def _locked(file: Path, how: int) -> int | None:
    """The lock file, locked; None where another has the lock or has removed the file meanwhile."""
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, how)
        with suppress(FileNotFoundError):
            if os.fstat(lock).st_ino == file.stat().st_ino:
                return lock
    except BlockingIOError:
        pass
    except BaseException:  # an interrupt while it waited, too: the descriptor goes; raised again
        os.close(lock)
        raise
    os.close(lock)
    return None
