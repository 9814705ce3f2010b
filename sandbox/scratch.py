"""Private node-local directories: made with mode 700, removed whatever modes and depths an agent left in them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sandbox.leftovers import OWNER, end_carriers, identity

# Few imports of the standard library alone: the spawner process imports this file too, and must start fast.

OWNED = "owned-"
"""How the names of directories begin that `sweep` may remove."""


def make_private(parent: Path, prefix: str) -> Path:
    """A new directory of mode 700 under `parent`, which is made where missing."""
    parent.mkdir(parents=True, exist_ok=True)
    path = parent / (prefix + os.urandom(6).hex())
    path.mkdir(mode=0o700)
    return path


@contextmanager
def owned(base: Path, prefix: str) -> Iterator[Path]:
    """A private directory under `base` that is this process's until the block ends or the process dies.

    The owner holds a lock on the directory, so that `sweep` knows the directories of the dead.
    """
    with _locked(base):
        path = make_private(base, OWNED + prefix)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        (path / OWNER).write_text(identity())
    try:
        yield path
    finally:
        remove_tree(path)
        os.close(lock)


def sweep(base: Path) -> int:
    """Remove the owned directories under `base` whose owners have died without doing it; how many there were.

    Processes that carry such an owner's name are ended first.
    """
    dead = []
    with _locked(base):
        for path in base.glob(OWNED + "*"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                dead.append(path)
            os.close(fd)
    for path in dead:
        with suppress(OSError):
            end_carriers((path / OWNER).read_text())
    # Nobody takes up an owned directory again, so that these are removed without keeping others waiting.
    return sum(remove_tree(path) for path in dead)


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Between making a directory and locking it nobody else looks."""
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def remove_tree(path: Path) -> bool:
    """Remove a directory and all in it; True when nothing is left.

    Each directory found is first moved up beside the others and then emptied, so neither depth nor path length
    matters; directories without permissions (overlayfs leaves one, agents leave any) are opened by their owner's right.
    """
    try:
        path.chmod(0o700)
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        counter = 0
        pending = _empty(top, top, counter)
        while pending:
            name = pending.pop()
            with suppress(OSError):
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
                try:
                    counter += 1
                    pending.extend(_empty(inner, top, counter))
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    try:
        path.rmdir()
    except OSError:
        return not path.exists()
    return True


def remove_few(path: str, most: int = 64) -> None:
    """Remove a directory that holds at most so many names, whatever their depth; a larger one stays as it is.

    For what nobody uses any more, and in the fewest system calls: it is done for every sandbox. What cannot be read or
    removed stays: who waits for its end removes that in its own time.
    """
    directories, names = [path], list[str]()
    try:
        for directory in directories:  # which grows meanwhile
            with os.scandir(directory) as entries:
                for entry in entries:
                    (directories if entry.is_dir(follow_symlinks=False) else names).append(entry.path)
                    if len(directories) + len(names) > most + 1:
                        return
        for name in names:
            os.unlink(name)  # noqa: PTH108 - text is all there is
        for directory in reversed(directories):
            os.rmdir(directory)  # noqa: PTH106
    except OSError:  # gone, or without permissions
        return


def _removed(name: str, directory: int) -> bool:
    """Remove what one call can remove: anything but a directory, and an empty directory. False: there is more in it."""
    try:
        os.unlink(name, dir_fd=directory)
    except IsADirectoryError:
        with suppress(OSError):
            os.rmdir(name, dir_fd=directory)
            return True
        return False
    return True


def _empty(directory: int, top: int, counter: int) -> list[str]:
    """Unlink the files of a directory and move its directories under `top`; returns their names there."""
    moved = []
    for name in os.listdir(directory):
        with suppress(OSError):
            if _removed(name, directory):
                continue
            os.chmod(name, 0o700, dir_fd=directory)
            if directory == top:
                moved.append(name)
            else:
                there = f".rm-{counter}-{len(moved)}"
                os.rename(name, there, src_dir_fd=directory, dst_dir_fd=top)
                moved.append(there)
    return moved
