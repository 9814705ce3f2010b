"""The journal's line format: `crc32hex SPACE json NEWLINE`, and how far a part can be believed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stages import sharedfs
from stages.errors import JournalError


class Line(NamedTuple):
    """One believable line: its JSON, where the next line starts, and its crc as written."""

    body: memoryview
    end: int
    crc: str


def encode_line(body: bytes) -> bytes:
    """One journal line."""
    return b"%08x %b\n" % (zlib.crc32(body), body)


def scan(data: bytes) -> Iterator[Line]:
    """Lines from the start of a part up to the first that is torn or damaged; what follows that one is not believed."""
    view = memoryview(data)
    position = 0
    while True:
        end = data.find(b"\n", position)
        if end < 0 or end - position < 10 or data[position + 8] != 0x20:
            return
        body = view[position + 9 : end]
        crc = data[position : position + 8]
        if b"%08x" % zlib.crc32(body) != crc:
            return
        position = end + 1
        yield Line(body, position, crc.decode())


def scan_sealed(data: bytes, length: int, name: str, start: int = 0) -> Iterator[Line]:
    """Lines of a sealed part from byte `start` on, where `data` begins: whole lines up to exactly `length`.

    Raises:
        JournalError: the part is shorter or damaged inside what a later epoch has sealed as good.
    """
    position = start
    for line in scan(data):
        position = start + line.end
        yield line
    if position != length:
        raise _damaged(name, length, position, start + len(data))


def check_size(path: Path, length: int, name: str) -> None:
    """Raise JournalError where a sealed part that need not be read has lost bytes."""
    if (size := sharedfs.stat_size(path)) < length:
        raise _damaged(name, length, size, size)


def _damaged(name: str, length: int, readable: int, size: int) -> JournalError:
    return JournalError(
        f"journal part {name}: sealed at {length} bytes, readable up to {readable} of {size}; "
        "restore the file or start a new run directory",
        part=name,
    )
