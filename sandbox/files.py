"""The files of a sandbox: read, write, list, replace, upload and download, confined to its root and atomic."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal, ParamSpec, TypeVar

from sandbox.confined import open_in_root, open_parent, open_regular
from sandbox.errors import FilesError
from sandbox.protocols import FileEntry

_COPY_BYTES = 1024 * 1024

P = ParamSpec("P")
T = TypeVar("T")


class ConfinedFiles:
    """See `Files`. Each call opens the root anew in a thread, so a stopped sandbox cannot be written to by mistake.

    Args:
        root: where this process reaches the sandbox's root now; starts the sandbox where needed.
        limit_bytes: largest file that is read or written.
    """

    def __init__(self, root: Callable[[], Awaitable[Path]], limit_bytes: int) -> None:
        self._root, self._limit = root, limit_bytes

    async def read(self, path: str, *, limit_bytes: int | None = None) -> bytes:
        """See `Files.read`."""
        return await self._do("read", path, _read, path, self._limit if limit_bytes is None else limit_bytes)

    async def read_text(self, path: str, *, limit_bytes: int | None = None) -> str:
        """See `Files.read_text`."""
        return (await self.read(path, limit_bytes=limit_bytes)).decode("utf-8", "replace")

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """See `Files.write`."""
        raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
        if len(raw) > self._limit:
            raise _too_large(path, len(raw), self._limit)
        await self._do("write", path, _write, path, raw, mode & 0o777)

    async def list(self, path: str) -> tuple[FileEntry, ...]:
        """See `Files.list`."""
        return await self._do("list", path, _list, path)

    async def replace(self, path: str, old: str, new: str) -> None:
        """See `Files.replace`."""
        await self._do("edit", path, _replace, path, old.encode(), new.encode(), self._limit)

    async def upload(self, source: Path, path: str) -> None:
        """See `Files.upload`."""
        await self._do("upload to", path, _upload, source, path, self._limit)

    async def download(self, path: str, target: Path) -> None:
        """See `Files.download`."""
        await self._do("download", path, _download, path, target, self._limit)

    async def _do(self, verb: str, path: str, act: Callable[..., T], *arguments: object) -> T:
        root = await self._root()
        return await asyncio.to_thread(_in_root, root, verb, path, act, arguments)


def _in_root(root: Path, verb: str, path: str, act: Callable[..., T], arguments: tuple[object, ...]) -> T:
    try:
        fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return act(fd, *arguments)
        finally:
            os.close(fd)
    except OSError as error:
        raise FilesError(
            f"cannot {verb} {path!r} in the sandbox: {error.strerror or error}",
            boundary="files",
            path=path,
            errno=error.errno,
        ) from error


def _too_large(path: str, size: int, limit: int) -> FilesError:
    return FilesError(f"{path!r} has {size} bytes; at most {limit} are taken", boundary="files", path=path)


def _open_checked(root: int, path: str, limit: int) -> BinaryIO:
    file = os.fdopen(open_regular(root, path), "rb")
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        file.close()
        raise _too_large(path, size, limit)
    return file


def _read(root: int, path: str, limit: int) -> bytes:
    with _open_checked(root, path, limit) as file:
        data = file.read(limit + 1)  # it may grow while it is read
    if len(data) > limit:
        raise _too_large(path, len(data), limit)
    return data


def _write(root: int, path: str, data: bytes, mode: int) -> None:
    _write_with(root, path, mode, lambda file: file.write(data))


def _write_with(root: int, path: str, mode: int, fill: Callable[[BinaryIO], object]) -> None:
    directory, name = open_parent(root, path)
    temporary = f".{os.urandom(8).hex()}.tmp"
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                raise FilesError(f"{path!r} is a directory", boundary="files", path=path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=directory), "wb") as file:
                fill(file)
                os.fchmod(file.fileno(), mode)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:  # no temporary file stays, whatever broke; raised again
            with suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise
    finally:
        os.close(directory)


def _list(root: int, path: str) -> tuple[FileEntry, ...]:
    handle = open_in_root(root, path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.scandir(handle) as found:
            return tuple(sorted((_entry(one, handle) for one in found), key=lambda entry: entry.name))
    finally:
        os.close(handle)


def _entry(found: os.DirEntry[str], directory: int) -> FileEntry:
    kind: Literal["file", "directory", "link", "other"] = "other"
    size, target = 0, ""
    if found.is_symlink():
        kind = "link"
        with suppress(OSError):
            target = os.readlink(found.name, dir_fd=directory)
    elif found.is_dir(follow_symlinks=False):
        kind = "directory"
    elif found.is_file(follow_symlinks=False):
        kind = "file"
        with suppress(OSError):
            size = found.stat(follow_symlinks=False).st_size
    return FileEntry(_shown(found.name), kind, size, _shown(target))


def _shown(name: str) -> str:
    """A name as text; bytes that are no UTF-8 are replaced, for these records cross processes as JSON."""
    return os.fsencode(name).decode("utf-8", "replace")


def _replace(root: int, path: str, old: bytes, new: bytes, limit: int) -> None:
    with _open_checked(root, path, limit) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777
        data = file.read(limit)
    count = data.count(old) if old else 0
    if count != 1:
        raise FilesError(
            f"the text to replace occurs {count} times in {path!r}; it must occur once: give more of its surroundings",
            boundary="files",
            path=path,
            count=count,
        )
    changed = data.replace(old, new)
    if len(changed) > limit:
        raise _too_large(path, len(changed), limit)
    _write(root, path, changed, mode)


def _copy(source: BinaryIO, target: BinaryIO, path: str, limit: int) -> None:
    done = 0
    while chunk := source.read(_COPY_BYTES):
        done += len(chunk)
        if done > limit:
            raise _too_large(path, done, limit)
        target.write(chunk)


def _upload(root: int, source: Path, path: str, limit: int) -> None:
    with source.open("rb") as file:
        mode = 0o755 if os.fstat(file.fileno()).st_mode & 0o100 else 0o644
        _write_with(root, path, mode, lambda target: _copy(file, target, path, limit))


def _download(root: int, path: str, target: Path, limit: int) -> None:
    temporary = target.with_name(f".{target.name}.{os.urandom(8).hex()}.tmp")
    try:
        with _open_checked(root, path, limit) as file, temporary.open("xb") as out:
            _copy(file, out, path, limit)
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
