"""Task rows, stored once by digest beside the journal, in append-only packs that a restart can index by itself.

A record is `digest SPACE length SPACE crc32hex NEWLINE`, the row's JSON, and a newline. A record counts only from the
moment on that a journaled event names its digest, and the journal's line is written after the record is durable.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from typing import Any, Final

import msgspec

from stages import sharedfs
from stages.errors import JournalError
from stages.layout import RunLayout, parse_part

CACHE_BYTES: Final = 64 << 20
_HEADER = re.compile(rb"([0-9a-f]{32}) (\d+) ([0-9a-f]{8})\n")
_HEADER_MAX: Final = 64
_BLOCK: Final = 1 << 20
_OFFSET_BITS: Final = 44


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
        # A run may have a million rows: 16 bytes of digest, and pack and offset of its header in one number.
        self._places: dict[bytes, int] = {}
        self._packs: list[tuple[int, int]] = []
        self._staged: dict[str, bytes] = {}
        self._cache: dict[str, dict[str, Any]] = {}
        self._sizes: dict[str, int] = {}
        self._cached_bytes = 0
        self._file: sharedfs.AppendFile | None = None
        self._epoch = 0
        self._part = -1
        self._written = 0

    def load(self) -> None:
        """Index every pack that is there; a torn record at a pack's end was never acknowledged."""
        for name in sharedfs.list_dir(self._layout.payloads):
            parsed = parse_part(name)
            if parsed is not None:
                self._index(*parsed)

    def _index(self, epoch: int, part: int) -> None:
        path = self._layout.payloads_part(epoch, part)
        size, position, start, block = sharedfs.stat_size(path), 0, 0, b""
        pack = self._pack(epoch, part)
        while position < size:
            header = _HEADER.match(block, position - start, position - start + _HEADER_MAX)
            if header is None:
                # It lies across the block's end or beyond it: long rows are skipped, not read.
                start, block = position, sharedfs.read_range(path, position, _BLOCK)
                header = _HEADER.match(block, 0, _HEADER_MAX)
            if header is None:
                return
            after = start + header.end() + int(header[2]) + 1
            if after > size:
                return
            self._places[bytes.fromhex(header[1].decode())] = pack | position
            position = after

    def _pack(self, epoch: int, part: int) -> int:
        self._packs.append((epoch, part))
        return (len(self._packs) - 1) << _OFFSET_BITS

    def stage(self, row: Any) -> str:
        """Take a row in and return its digest; it is written with the next batch."""
        body = canonical(row)
        digest = digest_of(body)
        if bytes.fromhex(digest) not in self._places:
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
            self._written = self._pack(self._epoch, self._part)
        places, records, offset = {}, [], self._file.length
        for digest, body in staged.items():
            header = b"%b %d %08x\n" % (digest.encode(), len(body), zlib.crc32(body))
            records += [header, body, b"\n"]
            places[bytes.fromhex(digest)] = self._written | offset
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
        place = self._places.get(bytes.fromhex(digest))
        if place is None:
            raise JournalError(f"payload {digest} is in no pack of {self._layout.payloads}", digest=digest)
        path = self._layout.payloads_part(*self._packs[place >> _OFFSET_BITS])
        offset = place & ((1 << _OFFSET_BITS) - 1)
        header = _HEADER.match(sharedfs.read_range(path, offset, _HEADER_MAX))
        length, crc = (int(header[2]), int(header[3], 16)) if header else (0, -1)
        body = sharedfs.read_range(path, offset + (header.end() if header else 0), length)
        if zlib.crc32(body) != crc or digest_of(body) != digest:
            raise JournalError(f"payload {digest} is damaged: {path} at {offset}", digest=digest)
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
