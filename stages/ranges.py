"""Reading a committed byte range: what is short, absent or fails its crc is "not yet" for a while, then an error.

A range is named only after its fsync, so a reader that cannot see it looks through a stale cache (NFS, Lustre) and
gets another chance until `visibility_s` is over. Only the standard library: the shard reader imports this.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import time
import zlib
from pathlib import Path

from stages import sharedfs
from stages.errors import ShardError
from stages.gathered import Gathered

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
STALE = frozenset({errno.ENOENT, errno.ESTALE})


class NotYetError(ShardError):
    """The range is not visible here as it was committed; it may be in a moment."""


def failure(path: Path, offset: int, length: int, found: str) -> NotYetError:
    """The error that names the file, the range and what was found instead."""
    what = f"{path}: bytes {offset}..{offset + length} are not there as committed: {found}"
    return NotYetError(what, path=str(path), offset=offset, length=length, found=found)


def check(path: Path, offset: int, length: int, crc32: int, data: bytes | memoryview) -> None:
    """Raise NotYetError unless `data` is `length` bytes with this zlib crc32."""
    size = memoryview(data).nbytes
    if size < length:
        raise failure(path, offset, length, f"only {size} of {length} bytes are visible")
    actual = zlib.crc32(data)
    if actual != crc32:
        raise failure(path, offset, length, f"crc32 is {actual:#010x}, committed was {crc32:#010x}")


def from_os_error(path: Path, offset: int, length: int, error: OSError) -> ShardError:
    """NotYetError for a name that a stale cache may hide, ShardError for anything else."""
    if error.errno in STALE:
        return failure(path, offset, length, error.strerror or "the file is not visible")
    what = f"{path}: bytes {offset}..{offset + length} cannot be read: {error.strerror}"
    return ShardError(what, path=str(path), offset=offset, length=length, errno=error.errno)


def read_checked(path: Path, offset: int, length: int, crc32: int) -> bytes:
    """The bytes of a committed range.

    Raises:
        NotYetError: absent, short or of another crc.
        ShardError: the filesystem refuses to read it.
    """
    try:
        data = sharedfs.read_range(path, offset, length)
    except OSError as error:
        raise from_os_error(path, offset, length, error) from error
    check(path, offset, length, crc32, data)
    return data


async def wait_checked(
    path: Path, offset: int, length: int, crc32: int, visibility_s: float, reads: Gathered | None = None
) -> bytes:
    """The bytes of a committed range, asked for again until they are visible or `visibility_s` is over.

    With `reads` the first look is made together with others'.

    Raises:
        ShardError: not visible in time, or the filesystem refuses to read it.
    """
    deadline, pause = time.monotonic() + visibility_s, FIRST_PAUSE_S
    while True:
        try:
            if reads is None:
                return await asyncio.to_thread(read_checked, path, offset, length, crc32)
            together, reads = reads, None
            return await together.call(functools.partial(read_checked, path, offset, length, crc32))
        except NotYetError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise gave_up(error, visibility_s) from error
        await asyncio.sleep(min(pause, left))
        pause = min(pause * 2, LONGEST_PAUSE_S)


def gave_up(error: NotYetError, visibility_s: float) -> ShardError:
    """What a "not yet" becomes when its time is over."""
    return ShardError(f"{error}; waited {visibility_s:g} s (fs.visibility_s)", **error.detail)
