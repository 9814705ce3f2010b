"""All I/O on the shared filesystem: small synchronous calls, atomic files and append-only files that break for good.

One door, so that one place knows the durability rules and one place can inject faults: every call below goes through a
`FileSystem` object (stages/syscalls.py), which `use` replaces for a test. Callers inside an event loop
wrap these functions in `asyncio.to_thread`: an fsync on Lustre takes 100 ms on a good day.

What goes wrong is raised as `OSError` with the errno and the path of the kernel's own answer: callers decide by errno
(ENOSPC waits, EIO rotates), so nothing is mapped here. Only the standard library is imported: the shard reader, which
trainers use with pyarrow alone, reads through this module too.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from stages.syscalls import FileSystem

FILE_MODE = 0o600
DIR_MODE = 0o700
_CHUNK = 64 << 20
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

_temp_numbers = itertools.count()


class BrokenFileError(OSError):
    """An append-only file failed once and takes nothing more; `good_length` bytes of it are known to be durable."""

    def __init__(self, errno_: int, message: str, path: Path, good_length: int) -> None:
        super().__init__(errno_, message, str(path))
        self.good_length = good_length


_io: FileSystem = FileSystem()


@contextlib.contextmanager
def use(fs: FileSystem) -> Iterator[None]:
    """Send every call of this process through `fs` until the block ends."""
    global _io
    before, _io = _io, fs
    try:
        yield
    finally:
        _io = before


def system() -> FileSystem:
    """The calls that this module makes, for stages/storefs.py."""
    return _io


@contextlib.contextmanager
def _opened(path: Path, flags: int, mode: int = FILE_MODE) -> Iterator[int]:
    fd = _io.open(str(path), flags, mode)
    try:
        yield fd
    finally:
        _io.close(fd)


def _pread_all(fd: int, length: int, offset: int) -> bytes:
    """Bytes [offset, offset+length), or fewer where the file ends."""
    first = _io.pread(fd, min(length, _CHUNK), offset)
    if len(first) == length or not first:
        return first
    parts, have = [first], len(first)
    while have < length:
        part = _io.pread(fd, min(length - have, _CHUNK), offset + have)
        if not part:
            break
        parts.append(part)
        have += len(part)
    return b"".join(parts)


def _write_all(fd: int, data: bytes | memoryview) -> int:
    """Bytes written: all of them, or what was written when one call came back short."""
    view, done = memoryview(data), 0
    while done < len(view):
        piece = view[done : done + _CHUNK]
        written = _io.write(fd, piece)
        done += written
        if written < len(piece):
            break
    return done


def read_bytes(path: Path) -> bytes:
    """The whole file as it is visible now."""
    with _opened(path, _READ_FLAGS) as fd:
        return _pread_all(fd, max(_io.fstat(fd).st_size, 1), 0)


def read_range(path: Path, offset: int, length: int) -> bytes:
    """Bytes [offset, offset+length); fewer where the file, as it is visible now, ends earlier."""
    with _opened(path, _READ_FLAGS) as fd:
        return _pread_all(fd, length, offset)


def map_file(path: Path) -> mmap.mmap | None:
    """The file memory-mapped read-only at its present size, or None while it is empty."""
    with _opened(path, _READ_FLAGS) as fd:
        size = _io.fstat(fd).st_size
        return _io.mmap(fd, size) if size else None


def stat_size(path: Path) -> int:
    """Size in bytes; opened first, because NFS answers a bare stat from its cache for up to a minute."""
    with _opened(path, _READ_FLAGS) as fd:
        return _io.fstat(fd).st_size


def exists(path: Path) -> bool:
    """Whether the name is visible now."""
    try:
        _io.stat(str(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def list_dir(path: Path) -> list[str]:
    """Names in a directory, sorted as text. For start-up only: nothing lists a shared directory in a loop."""
    return sorted(_io.listdir(str(path)))


def sync_dir(path: Path) -> None:
    """Make the directory's names durable."""
    with _opened(path, _READ_FLAGS | os.O_DIRECTORY) as fd:
        _io.fsync(fd)


def make_dirs(path: Path) -> None:
    """Create the directory and its missing parents, mode 0700; one that is there already stays as it is.

    Raises:
        FileNotFoundError: a parent is there and takes no directory all the same, as below /proc.
    """
    try:
        _make_dir(path)
    except FileNotFoundError:
        if path.parent == path:
            raise
        make_dirs(path.parent)
        _make_dir(path)  # once: where this says again that the parent is missing, no number of tries helps


def _make_dir(path: Path) -> None:
    try:
        _io.mkdir(str(path), DIR_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    sync_dir(path.parent)


def create_exclusive(path: Path, data: bytes, mode: int = FILE_MODE) -> None:
    """Create a durable file that must not exist; a half-written one is taken away again.

    Raises:
        FileExistsError: the name is taken.
    """
    with _opened(path, _CREATE_FLAGS, mode) as fd:
        try:
            written = _write_all(fd, data)
            if written < len(data):
                raise BrokenFileError(errno.ENOSPC, f"short write: {written} of {len(data)} bytes", path, 0)
            _io.fsync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                _io.unlink(str(path))
            raise
    sync_dir(path.parent)


def temp_beside(path: Path) -> Path:
    """A name in the directory of `path` that no other process or call of this one uses."""
    node = os.uname().nodename
    return path.with_name(f".{path.name}.{node}.{os.getpid()}.{next(_temp_numbers)}.{os.urandom(4).hex()}.tmp")


def publish(temp: Path, path: Path) -> None:
    """Give a finished, fsynced temp file its real name; on failure the temp is taken away."""
    try:
        _io.rename(str(temp), str(path))
    except OSError:
        with contextlib.suppress(OSError):
            _io.unlink(str(temp))
        raise
    sync_dir(path.parent)


def write_atomic(path: Path, data: bytes, mode: int = FILE_MODE) -> None:
    """Replace or create `path` so that every reader sees the old bytes or the new ones, and the new ones last."""
    temp = temp_beside(path)
    create_exclusive(temp, data, mode)
    publish(temp, path)


def link(src: Path, dst: Path) -> bool:
    """Give `src` the second name `dst`; True when the name is ours, False when another's file has it.

    `src` must be private and have one name before. The proof is its link count, read through a fresh open: over NFS a
    retransmitted request tells the winner that it lost, so the return code alone proves nothing.

    Raises:
        OSError: the filesystem's answer, where the count shows that no link was made for another reason.
    """
    failure: OSError | None = None
    try:
        _io.link(str(src), str(dst))
    except OSError as error:
        failure = error
    with _opened(src, _READ_FLAGS) as fd:
        won = _io.fstat(fd).st_nlink >= 2
    if failure is not None and not won and not isinstance(failure, FileExistsError):
        raise failure
    if won:
        sync_dir(dst.parent)
    return won


def unlink(path: Path) -> None:
    """Remove the name; one that is gone already is no error."""
    with contextlib.suppress(FileNotFoundError):
        _io.unlink(str(path))


class AppendFile:
    """An append-only file that this process alone writes, made by exclusive creation.

    After one short write or failed fsync it is broken for good: Linux marks the pages of a failed fsync clean, so a
    second try would lie. What is known to be durable is `good_length`; the caller goes on in a new file and writes
    anew what was not acknowledged. `append` and `sync` may run in different threads, but only one `append` at a time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._broken: OSError | None = None
        self._length = 0
        self._good_length = 0
        self._fd: int | None = _io.open(str(path), _CREATE_FLAGS | os.O_APPEND, FILE_MODE)
        try:
            sync_dir(path.parent)
        except OSError:
            self.close()
            raise

    @property
    def length(self) -> int:
        """Bytes written so far, durable or not."""
        return self._length

    @property
    def good_length(self) -> int:
        """Bytes known to be durable."""
        return self._good_length

    @property
    def broken(self) -> bool:
        """Whether a write or an fsync has failed."""
        return self._broken is not None

    def append(self, data: bytes | memoryview) -> int:
        """Write at the end and return the offset of the first byte; durable only after `sync`.

        Raises:
            BrokenFileError: this write failed or came back short, or an earlier call did.
        """
        fd, offset, size = self._usable(), self._length, memoryview(data).nbytes
        try:
            written = _write_all(fd, data)
        except OSError as error:
            raise self._break(error.errno or errno.EIO, f"write of {size} bytes: {error.strerror}", error) from error
        self._length += written
        if written < size:
            raise self._break(errno.ENOSPC, f"short write at offset {offset}: {written} of {size} bytes", None)
        return offset

    def sync(self) -> int:
        """Make everything appended before this call durable and return `good_length`.

        Raises:
            BrokenFileError: the fsync failed, or an earlier call did.
        """
        fd, target = self._usable(), self._length
        if target == self._good_length:
            return target
        try:
            _io.fsync(fd)
        except OSError as error:
            raise self._break(error.errno or errno.EIO, f"fsync: {error.strerror}", error) from error
        self._good_length = max(self._good_length, target)
        return self._good_length

    def close(self) -> None:
        """Close the file; closing twice is no error. What was not synced may be lost."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                _io.close(fd)

    def __enter__(self) -> AppendFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _usable(self) -> int:
        if self._broken is not None:
            raise self._break(self._broken.errno or errno.EIO, "failed before: go on in a new file", self._broken)
        if self._fd is None:
            raise BrokenFileError(errno.EBADF, "append-only file is closed", self.path, self._good_length)
        return self._fd

    def _break(self, errno_: int, message: str, cause: OSError | None) -> BrokenFileError:
        message = f"{message} ({self._good_length} bytes are durable)"
        error = BrokenFileError(errno_, message, self.path, self._good_length)
        if self._broken is None:
            self._broken = cause or error
        return error


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[AppendFile]:
    """A file too large for `write_atomic`: appended to under a temp name, published when the block ends well."""
    temp = temp_beside(path)
    file = AppendFile(temp)
    try:
        with file:
            yield file
            file.sync()
    except BaseException:  # no temporary file stays, whatever broke; raised again
        unlink(temp)
        raise
    publish(temp, path)
