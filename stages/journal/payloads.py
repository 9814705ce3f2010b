"""Task rows, stored once by digest beside the journal, in append-only packs that a restart can index by itself.

A record is `digest SPACE length SPACE crc32hex NEWLINE`, the row's JSON, and a newline. A record counts only from the
moment on that a journaled event names its digest, and the journal's line is written after the record is durable.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from typing import Any, Final, NamedTuple

import msgspec

from stages import sharedfs
from stages.errors import JournalError
from stages.layout import RunLayout, parse_part

CACHE_BYTES: Final = 64 << 20
_HEADER = re.compile(rb"([0-9a-f]{32}) (\d+) ([0-9a-f]{8})\n")
_HEADER_MAX: Final = 64


class _Place(NamedTuple):
    epoch: int
    part: int
    offset: int
    length: int
    crc: int


def digest_of(body: bytes) -> str:
    """blake2b-128 of the row's canonical JSON, in hexadecimal."""
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def canonical(row: Any) -> bytes:
    """A row as the bytes that its digest is taken over.

    Raises:
        TypeError: the row holds something that JSON has no word for.
    """
    return msgspec.json.encode(row, order="sorted")


class Payloads:
    """The packs of a run directory: rows are staged with an event, written before its journal line, read by digest."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._places: dict[str, _Place] = {}
        self._staged: dict[str, bytes] = {}
        self._cache: dict[str, dict[str, Any]] = {}
        self._sizes: dict[str, int] = {}
        self._cached_bytes = 0
        self._file: sharedfs.AppendFile | None = None
        self._epoch = 0
        self._part = -1
        self.damaged: list[str] = []

    def load(self) -> None:
        """Index every pack that is there; a torn record at a pack's end was never acknowledged."""
        for name in sharedfs.list_dir(self._layout.payloads):
            parsed = parse_part(name)
            if parsed is not None:
                self._index(*parsed)

    def _index(self, epoch: int, part: int) -> None:
        data = sharedfs.read_bytes(self._layout.payloads_part(epoch, part))
        position = 0
        while match := _HEADER.match(data, position, position + _HEADER_MAX):
            offset, length = match.end(), int(match[2])
            if offset + length + 1 > len(data):
                return
            self._places[match[1].decode()] = _Place(epoch, part, offset, length, int(match[3], 16))
            position = offset + length + 1

    def stage(self, row: Any) -> str:
        """Take a row in and return its digest; it is written with the next batch."""
        body = canonical(row)
        digest = digest_of(body)
        if digest not in self._places:
            self._staged[digest] = body
        return digest

    def begin(self, epoch: int) -> None:
        """Write from here on in packs of this epoch."""
        self._epoch = epoch

    def take_staged(self) -> dict[str, bytes]:
        """What must be durable before the next batch of events; hand it to `write`."""
        staged, self._staged = self._staged, {}
        for digest, body in staged.items():
            # Readable from memory while the write is under way.
            self._remember(digest, msgspec.json.decode(body), len(body))
        return staged

    def write(self, staged: dict[str, bytes]) -> None:
        """Append and fsync; in a thread.

        Raises:
            OSError: the pack is broken; call again with the same rows, a new pack is begun.
        """
        if not staged:
            return
        if self._file is None or self._file.broken:
            self._part += 1
            self._file = sharedfs.AppendFile(self._layout.payloads_part(self._epoch, self._part))
        places, records, offset = {}, [], self._file.length
        for digest, body in staged.items():
            crc = zlib.crc32(body)
            header = b"%b %d %08x\n" % (digest.encode(), len(body), crc)
            records += [header, body, b"\n"]
            places[digest] = _Place(self._epoch, self._part, offset + len(header), len(body), crc)
            offset += len(header) + len(body) + 1
        self._file.append(b"".join(records))
        self._file.sync()
        self._places.update(places)

    def cached(self, digest: str) -> dict[str, Any] | None:
        """The row, if it is in memory."""
        return self._cache.get(digest)

    def read(self, digest: str) -> dict[str, Any]:
        """The row of a digest; touches the filesystem where it is not in memory.

        Raises:
            JournalError: unknown digest or damaged record.
        """
        if digest in self._cache:
            return self._cache[digest]
        place = self._places.get(digest)
        if place is None:
            raise JournalError(f"payload {digest} is in no pack of {self._layout.payloads}", digest=digest)
        path = self._layout.payloads_part(place.epoch, place.part)
        body = sharedfs.read_range(path, place.offset, place.length)
        if zlib.crc32(body) != place.crc:
            raise JournalError(f"payload {digest} is damaged: {path} at {place.offset}", digest=digest)
        row: dict[str, Any] = msgspec.json.decode(body)
        self._remember(digest, row, len(body))
        return row

    def _remember(self, digest: str, row: dict[str, Any], size: int) -> None:
        self._cached_bytes += size - self._sizes.get(digest, 0)
        self._cache[digest], self._sizes[digest] = row, size
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            oldest = next(iter(self._cache))
            del self._cache[oldest]
            self._cached_bytes -= self._sizes.pop(oldest)

    def close(self) -> None:
        """Close the pack being written."""
        if self._file is not None:
            self._file.close()
