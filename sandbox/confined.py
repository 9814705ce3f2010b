"""Opening paths that cannot leave a root directory: openat2 with RESOLVE_IN_ROOT, the kernel's own confinement."""

from __future__ import annotations

import ctypes
import errno
import os
import stat

_SYS_OPENAT2 = 437  # the same number on every architecture of Linux
_RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x02, 0x10
_TRIES = 16
_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_in_root(root: int, path: str, flags: int) -> int:
    """Open `path` as a process would whose root directory is `root`: absolute links and `..` stay inside.

    Args:
        root: descriptor of the root directory.
        path: absolute or relative, both from the root.
        flags: as of os.open; no file is created.

    Raises:
        OSError: as of os.open; EAGAIN where renames kept the kernel from deciding.
    """
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    name = os.fsencode(path)
    if b"\0" in name:
        raise OSError(errno.EINVAL, "the path holds a NUL byte", path)
    for _ in range(_TRIES):
        fd = _libc.syscall(_SYS_OPENAT2, root, name, ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return int(fd)
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), path)


def open_regular(root: int, path: str) -> int:
    """Open a regular file for reading; nothing else is ever opened, so no FIFO blocks and no device acts.

    Raises:
        OSError: as of os.open; EINVAL where it is no regular file.
    """
    handle = open_in_root(root, path, os.O_PATH)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a directory", path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file", path)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(handle)


def final_path(root: int, path: str) -> str:
    """The path of what `path` leads to, where its last name is a link or a chain of them; it need not be there.

    Raises:
        OSError: ELOOP where the links never end.
    """
    for _ in range(_TRIES):
        parent, _, name = path.rstrip("/").rpartition("/")
        try:
            directory = open_in_root(root, parent or "/", os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            return path
        try:
            target = os.readlink(name, dir_fd=directory)
        except OSError:  # no link, or nothing
            return path
        finally:
            os.close(directory)
        path = target if target.startswith("/") else f"{parent}/{target}"
    raise OSError(errno.ELOOP, "its links never end", path)


def open_parent(root: int, path: str, *, make: bool = True) -> tuple[int, str]:
    """Open the directory that holds `path`, made where missing with all above it; also returns the last name.

    Args:
        root: descriptor of the root directory.
        path: absolute or relative, both from the root.
        make: whether what is missing is made.

    Raises:
        OSError: a part of the way is no directory or may not be written; EINVAL where there is no last name.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or parts[-1] == ".." or "\0" in path:
        raise OSError(errno.EINVAL, "it names no file", path)
    way = "/"
    directory = open_in_root(root, way, os.O_PATH | os.O_DIRECTORY)
    for part in parts[:-1]:
        way = f"{way}{part}/"
        try:
            deeper = open_in_root(root, way, os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            if not make:
                os.close(directory)
                raise
            try:
                os.mkdir(part, 0o755, dir_fd=directory)
                deeper = open_in_root(root, way, os.O_PATH | os.O_DIRECTORY)
                os.chmod(f"/proc/self/fd/{deeper}", 0o755)  # noqa: PTH101, S103 - whatever our umask is
            except OSError:
                os.close(directory)
                raise
        except OSError:
            os.close(directory)
            raise
        os.close(directory)
        directory = deeper
    return directory, parts[-1]
