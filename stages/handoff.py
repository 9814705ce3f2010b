"""Handoff segments: what RUN leaves for EVAL and for other RUN workers, append-only, each with its own header and crc.

A record is a 32-byte header, a MessagePack body, the packed layer as raw bytes behind it, and zeros up to a multiple
of 8. The header's crc32 makes a segment readable without an index; the range's crc32, which travels with the
commit, covers the whole record.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stages import ranges
from stages.checkpoint import Checkpoint
from stages.errors import SchemaError, ShardError
from stages.gathered import Gathered
from stages.groupcommit import ROTATE_BYTES, Block, GroupCommit, Policy
from stages.layout import RunLayout
from stages.trajectory import CheckpointRange, RowRange, RunResult

MAGIC = b"RMSG"
VERSION = 2
"""2: token streams packed; 1 had them as lists of numbers."""
KIND_RUN_RESULT = 1
KIND_CHECKPOINT = 2
_HAS_BLOB = 1
_HEAD = struct.Struct("<4sBBHQQ")
"""Magic, version, kind, flags, body length, blob length."""
_CRC = struct.Struct("<I4x")
"""zlib crc32 over head, body and blob."""
_HEADER_BYTES = _HEAD.size + _CRC.size
_TOKEN_BYTES = 9

Record = RunResult | Checkpoint

_results = msgspec.msgpack.Decoder(RunResult)
_checkpoints = msgspec.msgpack.Decoder(Checkpoint)
_encoder = msgspec.msgpack.Encoder()


def encode_record(record: Record) -> bytes:
    """One record's bytes, padded to a multiple of 8."""
    if isinstance(record, RunResult):
        kind, blob, bare = KIND_RUN_RESULT, record.workspace, msgspec.structs.replace(record, workspace=None)
        body = _encoder.encode(bare)
    else:
        kind, blob = KIND_CHECKPOINT, record.layer
        body = _encoder.encode(msgspec.structs.replace(record, layer=None))
    flags = 0 if blob is None else _HAS_BLOB
    data = blob or b""
    head = _HEAD.pack(MAGIC, VERSION, kind, flags, len(body), len(data))
    crc = zlib.crc32(data, zlib.crc32(body, zlib.crc32(head)))
    padding = -(len(body) + len(data)) % 8
    return b"".join((head, _CRC.pack(crc), body, data, bytes(padding)))


def decode_record(data: bytes, where: str) -> RunResult:
    """The RUN result in these bytes; `where` names them in errors.

    Raises:
        SchemaError: written by a newer version.
        ShardError: not a whole, intact RUN record.
    """
    body, blob = _taken_apart(data, where, KIND_RUN_RESULT)
    try:
        result = _results.decode(body)
    except msgspec.MsgspecError as error:
        raise ShardError(f"{where}: the record's body does not read as a RUN result: {error}") from error
    return result if blob is None else msgspec.structs.replace(result, workspace=bytes(blob))


def decode_checkpoint(data: bytes, where: str) -> Checkpoint:
    """The checkpoint in these bytes; `where` names them in errors.

    Raises:
        SchemaError: written by a newer version.
        ShardError: not a whole, intact checkpoint.
    """
    body, blob = _taken_apart(data, where, KIND_CHECKPOINT)
    try:
        checkpoint = _checkpoints.decode(body)
    except msgspec.MsgspecError as error:
        raise ShardError(f"{where}: the record's body does not read as a checkpoint: {error}") from error
    return checkpoint if blob is None else msgspec.structs.replace(checkpoint, layer=bytes(blob))


def _taken_apart(data: bytes, where: str, expected: int) -> tuple[memoryview, memoryview | None]:
    """Body and blob of a record whose crc is right and whose kind is the expected one."""
    if len(data) < _HEADER_BYTES or not data.startswith(MAGIC):
        raise ShardError(f"{where}: no handoff record begins here ({data[:4]!r}, {len(data)} bytes)")
    _, version, kind, flags, body_length, blob_length = _HEAD.unpack_from(data)
    if version > VERSION:
        raise SchemaError(f"{where}: handoff record version {version}, known is {VERSION}: run a newer rollmill here")
    if version < VERSION:
        raise SchemaError(
            f"{where}: handoff record version {version}, known is {VERSION}: run the rollmill that wrote it"
        )
    (crc,) = _CRC.unpack_from(data, _HEAD.size)
    view = memoryview(data)[_HEADER_BYTES : _HEADER_BYTES + body_length + blob_length]
    if len(view) < body_length + blob_length or zlib.crc32(view, zlib.crc32(data[: _HEAD.size])) != crc:
        raise ShardError(
            f"{where}: the record is torn: {len(view)} of {body_length + blob_length} bytes or a wrong crc"
        )
    if kind != expected:
        names = {KIND_RUN_RESULT: "a RUN result", KIND_CHECKPOINT: "a checkpoint"}
        raise ShardError(f"{where}: record kind {kind} is not {names[expected]} ({expected})")
    return view[:body_length], view[body_length:] if flags & _HAS_BLOB else None


def _where(run_dir: Path, place: RowRange | CheckpointRange) -> str:
    return f"{run_dir / place.path} at {place.offset}+{place.length}"


def read_record(run_dir: Path, place: RowRange) -> RunResult:
    """The record of a committed range, read once, now.

    Raises:
        NotYetError: absent, short or of another crc: it may become visible.
        ShardError: it is there and cannot be what was committed.
    """
    path = RunLayout(run_dir).resolve(place.path)
    data = ranges.read_checked(path, place.offset, place.length, place.crc32)
    return decode_record(data, _where(run_dir, place))


async def wait_record(
    run_dir: Path, place: RowRange, *, visibility_s: float = 60.0, reads: Gathered | None = None
) -> RunResult:
    """The record of a committed range, waited for until `visibility_s` is over; with `reads` looked for with others.

    Raises:
        ShardError: not visible in time, or not what was committed; names file, range and what was found.
    """
    path = RunLayout(run_dir).resolve(place.path)
    data = await ranges.wait_checked(path, place.offset, place.length, place.crc32, visibility_s, reads)
    return decode_record(data, _where(run_dir, place))


async def wait_checkpoint(run_dir: Path, place: CheckpointRange, *, visibility_s: float = 60.0) -> Checkpoint:
    """The checkpoint of a committed range, waited for until `visibility_s` is over.

    Raises:
        ShardError: not visible in time, or not what was committed; names file, range and what was found.
    """
    path = RunLayout(run_dir).resolve(place.path)
    data = await ranges.wait_checked(path, place.offset, place.length, place.crc32, visibility_s)
    return decode_checkpoint(data, _where(run_dir, place))


def _pack(records: Sequence[Record]) -> list[Block]:
    return [Block(encode_record(record), 1) for record in records]


def _weight(record: Record) -> int:
    if isinstance(record, RunResult):
        chains, blob = record.trajectory.chains, record.workspace
    else:
        chains, blob = record.stream.chains, record.layer
    return len(blob or b"") + _TOKEN_BYTES * sum(chain.length for chain in chains) + 1024


class SegmentWriter:
    """One RUN worker incarnation's segments: an async context manager whose `append` many callers use at once."""

    def __init__(
        self, layout: RunLayout, member: str, *, deadline_s: float = 120.0, rotate_bytes: int = ROTATE_BYTES
    ) -> None:
        policy = Policy[Record](
            path=lambda number: layout.segment(member, number),
            pack=_pack,
            weight=_weight,
            max_items=256,
            max_bytes=64 << 20,
            rotate_bytes=rotate_bytes,
        )
        self._commits = GroupCommit(layout, policy, deadline_s=deadline_s)

    async def append(self, record: Record) -> RowRange:
        """Write the record and return its range once it is durable.

        Raises:
            ShardError: it could not be made durable within the deadline.
        """
        return await self._commits.append(record)

    async def __aenter__(self) -> SegmentWriter:
        await self._commits.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._commits.__aexit__(*details)
