"""Lays an image's members out as a root file system, layer over layer; nothing hostile can write outside of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sandbox.confined import open_in_root, open_parent
from sandbox.errors import ImageError
from sandbox.images.members import Member, checked_path
from sandbox.scratch import remove_tree

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
MOUNT_POINTS = {b"proc": 0o755, b"sys": 0o755, b"dev": 0o755, b"run": 0o755, b"tmp": 0o1777}
"""Made where an image lacks them: backends mount there."""

_COPY_BYTES = 1024 * 1024


class RootWriter:
    """One root file system that is being written.

    Every directory is reached by `openat2` as a process would whose root this is, so a link in one layer leads the next
    one where it would lead in the image, and never out. Setuid and setgid bits are dropped, and the owner may read
    everything and change every directory: in a sandbox all belongs to its one user, who has no privilege.

    Args:
        root: an empty directory.
        what: names the image in messages.
        max_bytes: content above which it is refused as a bomb.
        max_entries: names above which it is refused.
    """

    def __init__(self, root: Path, what: str, *, max_bytes: int, max_entries: int) -> None:
        self._root, self._what = root, what
        self._bytes = self._max_bytes = max_bytes
        self._entries = self._max_entries = max_entries
        self.dropped = 0

    def apply(self, members: Iterable[Member], *, whiteouts: bool) -> None:
        """Write the members of one layer over what is there.

        Args:
            members: in the layer's order.
            whiteouts: names `.wh.x` delete what lower layers have; otherwise they are left out.

        Raises:
            ImageError: the layer is hostile, too large, or cannot be written.
        """
        handle = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        written: set[bytes] = set()
        try:
            for member in members:
                self._entries -= 1
                if self._entries < 0:
                    raise self._refused(f"has more than {self._max_entries} names")
                try:
                    self._write(handle, member, written if whiteouts else None)
                except OSError as error:
                    raise self._refused(f"{member.shown} cannot be written: {error.strerror}") from error
        finally:
            os.close(handle)

    def finish(self) -> None:
        """Add the mount points, and check that a sandbox can run on it.

        Raises:
            ImageError: it has no bash.
        """
        handle = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name, mode in MOUNT_POINTS.items():
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=handle)
                    os.chmod(name, mode, dir_fd=handle)
            os.close(open_in_root(handle, "/bin/bash", os.O_PATH))
        except OSError as error:
            raise self._refused("has no /bin/bash, which every sandbox's shell is") from error
        finally:
            os.close(handle)

    def _write(self, root: int, member: Member, written: set[bytes] | None) -> None:
        if not member.path or member.kind == "other":
            self.dropped += member.kind == "other"
            return
        if member.kind == "device":
            if member.path[-2:-1] != (b"dev",):
                raise self._refused(f"{member.shown} is a device; an image holds files, directories and links")
            self.dropped += 1  # what every backend mounts itself
            return
        if member.path[-1].startswith(WHITEOUT):
            if written is not None:
                self._delete(root, member, written)
            return
        if written is not None:
            written.update(b"/".join(member.path[:depth]) for depth in range(1, len(member.path) + 1))
        with _parent(root, member.path) as (directory, name):
            if member.kind == "directory":
                self._directory(directory, name, member)
                return
            self._clear(directory, name)
            if member.kind == "symlink":
                os.symlink(member.target, name, dir_fd=directory)
            elif member.kind == "hardlink":
                self._link(root, directory, name, member)
            else:
                self._file(directory, name, member)

    def _directory(self, directory: int, name: bytes, member: Member) -> None:
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=directory)
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=directory)
        os.chmod(name, member.mode & 0o1777 | 0o700, dir_fd=directory)

    def _file(self, directory: int, name: bytes, member: Member) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        assert member.content is not None
        with open(os.open(name, flags, 0o600, dir_fd=directory), "wb") as file:
            while chunk := member.content.read(_COPY_BYTES):
                self._bytes -= len(chunk)
                if self._bytes < 0:
                    raise self._refused(f"unpacks to more than {self._max_bytes} bytes")
                file.write(chunk)
            os.fchmod(file.fileno(), member.mode & 0o777 | 0o400)

    def _link(self, root: int, directory: int, name: bytes, member: Member) -> None:
        target = checked_path(member.target, f"{self._what}: the hard link {member.shown}")
        if not target:
            raise self._refused(f"{member.shown} is a hard link to the root")
        with _parent(root, target) as (other, there):
            status = os.stat(there, dir_fd=other, follow_symlinks=False)
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
                raise self._refused(f"{member.shown} is a hard link to something that is no file")
            os.link(there, name, src_dir_fd=other, dst_dir_fd=directory, follow_symlinks=False)

    def _delete(self, root: int, member: Member, written: set[bytes]) -> None:
        """Carry out a whiteout, or empty an opaque directory of what lower layers put there."""
        above, mark = member.path[:-1], member.path[-1]
        hidden = mark[len(WHITEOUT) :]
        with _inside(root, above) as directory:
            if directory is None:
                return
            if mark == OPAQUE:
                self._empty(directory, above, written)
            elif hidden in (b"", b".", b"..") or hidden.startswith(WHITEOUT):
                return  # marks of other tools (.wh..wh.plnk, .wh..wh.aufs): nothing is hidden by them
            elif b"/".join((*above, hidden)) not in written:
                self._clear(directory, hidden)

    def _empty(self, directory: int, above: tuple[bytes, ...], written: set[bytes]) -> None:
        """Remove what lower layers put into a directory, at any depth, and leave what this layer did."""
        for entry in os.listdir(directory):
            here = (*above, os.fsencode(entry))
            if b"/".join(here) not in written:
                self._clear(directory, here[-1])
                continue
            with suppress(NotADirectoryError):
                inner = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
                try:
                    self._empty(inner, here, written)
                finally:
                    os.close(inner)

    def _clear(self, directory: int, name: bytes) -> None:
        """Remove whatever has the name; a directory with all in it."""
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                remove_tree(Path(f"/proc/self/fd/{directory}") / os.fsdecode(name))
            else:
                os.unlink(name, dir_fd=directory)

    def _refused(self, why: str) -> ImageError:
        return ImageError(f"{self._what}: {why}", boundary="images")


@contextmanager
def _parent(root: int, path: tuple[bytes, ...]) -> Iterator[tuple[int, bytes]]:
    """The directory that holds the path, made where missing, and the last name."""
    directory, name = open_parent(root, os.fsdecode(b"/".join(path)))
    handle = os.open(f"/proc/self/fd/{directory}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.close(directory)
    try:
        yield handle, os.fsencode(name)
    finally:
        os.close(handle)


@contextmanager
def _inside(root: int, path: tuple[bytes, ...]) -> Iterator[int | None]:
    """The directory of the path; None where there is none."""
    try:
        handle = open_in_root(root, os.fsdecode(b"/" + b"/".join(path)), os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)
