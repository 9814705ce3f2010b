"""Snapshots: the ledger at one exact place of the journal, so that a restart replays only what came after it.

A snapshot only ever saves time. It names the exact bytes that it stands for and is used where history begins with
those bytes; one that is damaged, of another version or of another history is passed over for an older one, and
without any the whole journal is replayed: no part of it is ever deleted. So a snapshot that a fenced router writes
late is worth what it covers and no more.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from stages import sharedfs
from stages.journal.codec import encode_line, scan
from stages.layout import RunLayout, parse_part
from stages.ledger import image
from stages.ledger.events import Part

KEPT: Final = 2
_VERSION: Final = 1
_encoder = msgspec.json.Encoder()


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a snapshot, in the journal's line format; the image's bytes follow.

    Attributes:
        parts: what it stands for: all parts from the run's beginning, the last one up to a line of `last_line` bytes.
        seq: the highest seq that its events publish; the index held all of them when it was written.
        failed: how many of those have a line in failures.jsonl, which held all of them too.
        finished: segments that nothing needed any more and that were still to be deleted.
    """

    parts: list[Part]
    last_line: int
    seq: int
    failed: int
    finished: list[str]
    length: int
    crc: int
    v: int = _VERSION
    schema: str = image.SCHEMA


class Snapshot(NamedTuple):
    """A snapshot file that is whole; its image is not decoded yet."""

    name: str
    header: Header
    body: memoryview


def write(layout: RunLayout, epoch: int, number: int, header: Header, body: bytes) -> None:
    """Make a snapshot durable and take away the oldest beyond two. Blocking.

    Raises:
        OSError: the filesystem refuses; nothing is lost by that.
    """
    whole = msgspec.structs.replace(header, length=len(body), crc=zlib.crc32(body))
    sharedfs.write_atomic(layout.snapshot(epoch, number), encode_line(_encoder.encode(whole)) + body)
    for older in _keys(layout)[KEPT:]:
        if older < (epoch, number):
            sharedfs.unlink(layout.snapshot(*older))


def newest_first(layout: RunLayout) -> Iterator[Snapshot]:
    """The run's snapshots that are whole and of this version. Blocking."""
    for key in _keys(layout):
        try:
            data = sharedfs.read_bytes(layout.snapshot(*key))
        except FileNotFoundError:
            continue
        found = _parse(data)
        if found is not None:
            yield Snapshot(layout.snapshot(*key).name, *found)


def _keys(layout: RunLayout) -> list[tuple[int, int]]:
    parsed = (parse_part(name, ".snapshot") for name in sharedfs.list_dir(layout.journal))
    return sorted((key for key in parsed if key is not None), reverse=True)


def _parse(data: bytes) -> tuple[Header, memoryview] | None:
    line = next(scan(data), None)
    if line is None:
        return None
    try:
        header = msgspec.json.decode(line.body, type=Header)
    except msgspec.MsgspecError:
        return None
    body = memoryview(data)[line.end :]
    if (header.v, header.schema) != (_VERSION, image.SCHEMA) or len(body) != header.length:
        return None
    return (header, body) if zlib.crc32(body) == header.crc else None
