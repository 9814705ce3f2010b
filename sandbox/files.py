"""The files of a sandbox: read, write, list, edit, upload and download, confined to its root and atomic."""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal, ParamSpec, TypeVar

from sandbox.confined import final_path, open_in_root, open_parent, open_regular
from sandbox.editing import inserted, numbered, replaced
from sandbox.errors import FilesError
from sandbox.history import Before, History
from sandbox.patches import Patched, parse
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
        self._history = History()

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

    async def view(self, path: str, first: int = 1, last: int | None = None) -> str:
        """See `Files.view`."""
        data = await self.read(path)
        return await self._do("view", path, lambda _: numbered(data, first, last))

    async def create(self, path: str, text: str) -> None:
        """See `Files.create`."""
        await self._change(path, lambda before: _new(path, before, text.encode("utf-8", "surrogateescape")))

    async def replace(self, path: str, old: str, new: str) -> None:
        """See `Files.replace`."""
        sought, other = (text.encode("utf-8", "surrogateescape") for text in (old, new))
        await self._change(path, lambda before: replaced(path, _there(path, before), sought, other))

    async def insert(self, path: str, line: int, text: str) -> None:
        """See `Files.insert`."""
        added = text.encode("utf-8", "surrogateescape")
        await self._change(path, lambda before: inserted(_there(path, before), line, added))

    async def undo(self, path: str) -> None:
        """See `Files.undo`."""
        before = self._history.last(path)
        if before is None:
            raise FilesError(f"there is no edit of {path!r} to undo", boundary="files", path=path)
        await self._do("undo the edit of", path, _put_back, before)
        self._history.forget(path)

    async def remove(self, path: str) -> None:
        """See `Files.remove`."""
        await self._do("remove", path, _remove, path)

    async def patch(self, diff: str | bytes, *, directory: str = "/") -> tuple[str, ...]:
        """See `Files.patch`."""
        raw = diff.encode("utf-8", "surrogateescape") if isinstance(diff, str) else diff
        return await self._do("patch", directory, _patch, raw, directory, self._limit)

    async def upload(self, source: Path, path: str) -> None:
        """See `Files.upload`."""
        await self._do("upload to", path, _upload, source, path, self._limit)

    async def download(self, path: str, target: Path) -> None:
        """See `Files.download`."""
        await self._do("download", path, _download, path, target, self._limit)

    async def _change(self, path: str, change: Callable[[bytes | None], bytes]) -> None:
        before = await self._do("edit", path, _edit, path, change, self._limit)
        self._history.add(path, before)

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
    except ValueError as error:  # of the pure parts: what was asked for does not fit the file
        raise FilesError(f"cannot {verb} {path!r}: {error}", boundary="files", path=path) from error
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


def _there(path: str, before: bytes | None) -> bytes:
    if before is None:
        raise FileNotFoundError(errno.ENOENT, "it is not there", path)
    return before


def _new(path: str, before: bytes | None, data: bytes) -> bytes:
    if before is not None:
        raise FileExistsError(errno.EEXIST, "it is there already: edit it, or remove it first", path)
    return data


def _before(root: int, path: str, limit: int) -> Before:
    """What is at the end of a path that may be a link."""
    path = final_path(root, path)
    try:
        with _open_checked(root, path, limit) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777
            return Before(path, file.read(limit), mode)
    except FileNotFoundError:
        return Before(path, None, 0o644)


def _edit(root: int, path: str, change: Callable[[bytes | None], bytes], limit: int) -> Before:
    before = _before(root, path, limit)
    changed = change(before.data)
    if len(changed) > limit:
        raise _too_large(path, len(changed), limit)
    _write(root, before.path, changed, before.mode)
    return before


def _put_back(root: int, before: Before) -> None:
    if before.data is None:
        with suppress(FileNotFoundError):
            _remove(root, before.path)
    else:
        _write(root, before.path, before.data, before.mode)


def _remove(root: int, path: str) -> None:
    directory, name = open_parent(root, path, make=False)
    try:
        os.unlink(name, dir_fd=directory)
    finally:
        os.close(directory)


def _patch(root: int, diff: bytes, directory: str, limit: int) -> tuple[str, ...]:
    """All files are read and changed in memory first; what was written is put back where a later one fails."""
    patched = Patched(parse(diff), lambda name: _before(root, posixpath.join(directory, name), limit))
    for path, (data, _) in patched.afters.items():
        if len(data or b"") > limit:
            raise _too_large(path, len(data or b""), limit)
    written: list[Before] = []
    try:
        for path, (data, mode) in patched.afters.items():
            before = patched.befores[path]
            written.append(before)
            if data is not None:
                _write(root, before.path, data, mode)
            elif before.data is not None:
                _remove(root, before.path)
    except (OSError, FilesError):  # raised again
        for before in written:
            with suppress(OSError, FilesError):
                _put_back(root, before)
        raise
    return tuple(patched.befores[path].path for path in patched.afters)


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
