"""What an image is read from, name by name: the members of a tar stream or of a directory, in one form."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from sandbox.errors import ImageError

Kind = Literal["file", "directory", "symlink", "hardlink", "device", "other"]

MAX_DEPTH = 256
_READ_BYTES = 1024 * 1024
_PADDING_READS = 16
_LEFT_OUT = (b".singularity.d",)
"""Apptainer's own additions: it makes them anew where it needs them, and other backends have no use for them."""


@dataclass(frozen=True)
class Member:
    """One name of an image.

    Args:
        path: its parts below the root; empty for the root itself.
        kind: "device" and "other" (FIFOs, sockets) are never written.
        mode: permission bits as they were found.
        target: of a symlink as it stands; of a hard link the other name as it stands.
        content: of a file; read before the next member is asked for.
    """

    path: tuple[bytes, ...]
    kind: Kind
    mode: int = 0o644
    target: bytes = b""
    content: BinaryIO | None = None

    @property
    def shown(self) -> str:
        """The path for messages."""
        return "/" + b"/".join(self.path).decode("utf-8", "backslashreplace")


def tar_members(source: BinaryIO, what: str) -> Iterator[Member]:
    """The members of an uncompressed tar stream, which is read once and never sought in.

    Args:
        source: the stream.
        what: names it in messages.

    Raises:
        ImageError: it is no tar, is cut off, or names a path outside.
    """
    try:
        with tarfile.open(fileobj=source, mode="r|", encoding="utf-8", errors="surrogateescape") as archive:
            for info in archive:
                path = checked_path(os.fsencode(info.name), what)
                if path[:1] and (path[0] in _LEFT_OUT or _is_apptainers(path, os.fsencode(info.linkname))):
                    continue
                content = archive.extractfile(info) if info.isreg() else None
                yield Member(path, _kind(info), info.mode & 0o7777, os.fsencode(info.linkname), content)  # type: ignore[arg-type]
        for _ in range(_PADDING_READS):  # what comes after the end holds the compression's own checksum
            if not source.read(_READ_BYTES):
                return
        raise ImageError(f"{what} goes on after its end", boundary="images")
    except (tarfile.TarError, EOFError) as error:
        raise ImageError(f"{what} cannot be read as a tar archive: {error}", boundary="images") from error


def directory_members(root: Path, what: str) -> Iterator[Member]:
    """The members of a root file system directory, a directory before what is in it; no link is followed.

    Raises:
        ImageError: something in it cannot be read.
    """
    seen: dict[tuple[int, int], bytes] = {}
    try:
        yield from _walk(os.fsencode(root), (), seen)
    except OSError as error:
        raise ImageError(f"{what} cannot be read: {error.strerror} at {error.filename!r}", boundary="images") from error


def checked_path(name: bytes, what: str) -> tuple[bytes, ...]:
    """The parts of a member's or a hard link's name.

    Raises:
        ImageError: it is absolute, climbs, or is too deep.
    """
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    if name.startswith(b"/") or b".." in parts:
        raise ImageError(f"{what} names {name!r}, a path outside the image: refused", boundary="images")
    if len(parts) > MAX_DEPTH:
        raise ImageError(f"{what} nests directories deeper than {MAX_DEPTH}", boundary="images")
    return parts


def _is_apptainers(path: tuple[bytes, ...], target: bytes) -> bool:
    """A link in the root into what is left out: /environment, /singularity, /.run and others."""
    return len(path) == 1 and target.removeprefix(b"/").split(b"/")[0] in _LEFT_OUT


def _kind(info: tarfile.TarInfo) -> Kind:
    if info.isreg():
        return "file"
    if info.isdir():
        return "directory"
    if info.issym():
        return "symlink"
    if info.islnk():
        return "hardlink"
    return "device" if info.ischr() or info.isblk() else "other"


def _walk(directory: bytes, path: tuple[bytes, ...], seen: dict[tuple[int, int], bytes]) -> Iterator[Member]:
    for name in sorted(os.listdir(directory)):  # noqa: PTH208 - bytes
        whole, here = directory + b"/" + name, (*path, name)
        if here[0] in _LEFT_OUT:
            continue
        status = os.lstat(whole)
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISDIR(status.st_mode):
            checked_path(b"/".join(here), os.fsdecode(directory))
            yield Member(here, "directory", mode)
            yield from _walk(whole, here, seen)
        elif stat.S_ISREG(status.st_mode):
            first = seen.setdefault((status.st_dev, status.st_ino), b"/".join(here))
            if status.st_nlink > 1 and first != b"/".join(here):
                yield Member(here, "hardlink", mode, first)
                continue
            with open(os.open(whole, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as content:
                yield Member(here, "file", mode, content=content)
        elif stat.S_ISLNK(status.st_mode):
            target = os.readlink(whole)  # noqa: PTH115 - bytes
            if not _is_apptainers(here, target):
                yield Member(here, "symlink", 0o777, target)
        else:
            device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
            yield Member(here, "device" if device else "other", mode)
