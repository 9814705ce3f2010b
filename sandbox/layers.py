"""The layer format: changed files as a canonical tar in zstd, named by the sha256 of the uncompressed tar."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

from sandbox.errors import LayerError
from sandbox.extract import Extraction
from sandbox.protocols import PackedLayer
from sandbox.scratch import make_private, remove_tree
from sandbox.selection import Selection
from sandbox.tarstream import END, encode, padding, read_entries
from sandbox.uppertree import UpperWalk

DEFAULT_MAX_BYTES = 16 * 1024**3
DEFAULT_MAX_ENTRIES = 1_000_000
_COPY_BYTES = 1024 * 1024
_COMPRESSION = 3  # the digest is of the uncompressed tar, so this may change
_LARGEST_WINDOW = 128 * 1024 * 1024


def pack(
    trees: Mapping[bytes, Path],
    out_file: Path,
    *,
    paths: Sequence[str] = ("/",),
    exclude: Sequence[str] = (),
    max_bytes: int = DEFAULT_MAX_BYTES,
    max_entries: int = DEFAULT_MAX_ENTRIES,
) -> PackedLayer:
    """Pack upper directories into one file; the same content gives the same digest, whoever packs it and where.

    Entries come sorted by name within each directory, a directory before what is in it; owners are 0:0, times one
    constant, modes without setuid and setgid, no extended attributes; a deletion is `.wh.NAME`, a directory that hides
    what lies below `.wh..wh..opq`. Blocks; call it in a thread.

    Args:
        trees: mount point relative to the root (b"" for the root itself) -> upper directory.
        out_file: appears whole or not at all.
        paths: absolute paths whose changes are taken.
        exclude: globs left out; one with a slash meets the whole path, one without meets a name at any depth.
        max_bytes: size of the uncompressed tar above which the pack is refused.
        max_entries: names above which it is.

    Raises:
        LayerError: the changes cannot be read, or are too large or too many (`detail["content"]` is then True).
    """
    walk = UpperWalk(trees, Selection(paths, exclude))
    entries = 0
    with _appearing(out_file, max_bytes) as sink:
        for entry, content in walk.entries():
            sink.write(encode(entry))
            sink.expect(entry.size)
            if entries == max_entries:
                raise LayerError(
                    f"more than {max_entries} names have changed: exclude paths or raise the limit",
                    boundary="layers", content=True,
                )  # fmt: skip
            if entry.size:
                _copy(content, entry.size, entry.path, sink)
            entries += 1
    return PackedLayer(sink.digest, out_file.stat().st_size, str(out_file), sink.tar_bytes, entries, walk.skipped)


def pack_nothing(out_file: Path) -> PackedLayer:
    """The layer without entries, as `pack` makes it. Blocks.

    Raises:
        LayerError: it cannot be written.
    """
    with _appearing(out_file, DEFAULT_MAX_BYTES) as sink:
        pass
    return PackedLayer(sink.digest, out_file.stat().st_size, str(out_file), sink.tar_bytes, 0, 0)


@contextmanager
def _appearing(out_file: Path, max_bytes: int) -> Iterator[_Sink]:
    """What a layer is written to in the block; the file appears after it, whole, or not at all.

    Raises:
        LayerError: it cannot be written.
    """
    temporary = out_file.with_name(f".{out_file.name}.{os.urandom(6).hex()}.tmp")
    try:
        with temporary.open("xb") as file:
            sink = _Sink(file, max_bytes)
            yield sink
            sink.finish()
        temporary.rename(out_file)
    except OSError as error:
        raise LayerError(f"the layer cannot be written to {out_file}: {error.strerror}", boundary="layers") from error
    finally:
        temporary.unlink(missing_ok=True)


def unpack(
    source: BinaryIO,
    directory: Path,
    *,
    digest: str,
    max_bytes: int = DEFAULT_MAX_BYTES,
    max_entries: int = DEFAULT_MAX_ENTRIES,
) -> None:
    """Unpack a layer into a new directory in overlay format (whiteouts are 0:0 devices, opaque marks are attributes).

    It is laid out in a private directory beside, checked against the digest, and appears by one rename; a directory
    that is already there is left alone. Blocks; call it in a thread.

    Args:
        source: the compressed file, open for reading.
        directory: where the layer goes; its parent must exist on node-local disk.
        digest: "sha256:<hex>" of the uncompressed tar.
        max_bytes: of the uncompressed tar; what is larger is refused as a bomb.
        max_entries: names in it.

    Raises:
        LayerError: it is not what the digest says, no layer, too large, or cannot be written.
    """
    if directory.is_dir():
        return
    home = make_private(directory.parent, ".unpack-")
    try:
        stage = home / "layer"
        stage.mkdir(mode=0o700)
        stream = _Stream(source, max_bytes)
        extraction = Extraction(stage, max_entries)
        for entry, take in read_entries(stream.read):
            extraction.add(entry, take)
        found = stream.digest
        if found != digest:
            raise LayerError(f"the layer is {found}, not {digest}: fetch it again", boundary="layers")
        extraction.finish()
        with suppress(FileExistsError):
            _move(stage, directory)
    except zstandard.ZstdError as error:
        raise LayerError(f"the layer is no zstd stream: {error}", boundary="layers") from error
    except OSError as error:
        raise LayerError(f"the layer cannot be unpacked to {directory}: {error}", boundary="layers") from error
    finally:
        remove_tree(home)


def verify(source: BinaryIO, digest: str, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
    """Read a whole layer and compare it with its digest.

    Raises:
        LayerError: it is damaged.
    """
    stream = _Stream(source, max_bytes)
    try:
        while stream.read(_COPY_BYTES):
            pass
    except zstandard.ZstdError as error:
        raise LayerError(f"{digest} is no zstd stream: {error}", boundary="layers") from error
    if stream.digest != digest:
        raise LayerError(f"{digest} is damaged, it reads as {stream.digest}: import it again", boundary="layers")


DamagedStream = zstandard.ZstdError
"""What reading from `decompressed` raises."""


def decompressed(source: BinaryIO) -> BinaryIO:
    """What a zstd stream holds, as a stream; closing it leaves `source` open."""
    reader = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).stream_reader(
        source, closefd=False, read_across_frames=True
    )
    return cast(BinaryIO, reader)


def _move(stage: Path, directory: Path) -> None:
    try:
        stage.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
        # Another process of this node was faster; its layer has the same digest.


def _copy(content: int, size: int, path: bytes, sink: _Sink) -> None:
    left = size
    while left:
        chunk = os.read(content, min(left, _COPY_BYTES))
        if not chunk:
            raise LayerError(
                f"{path!r} shrank while it was packed: stop what writes to it", boundary="layers", content=True
            )
        sink.write(chunk)
        left -= len(chunk)
    sink.write(padding(size))


class _Sink:
    """Hashes and compresses what is written."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._hash = hashlib.sha256()
        self._writer = zstandard.ZstdCompressor(level=_COMPRESSION, write_checksum=True).stream_writer(
            file, closefd=False
        )
        self._max = max_bytes
        self.tar_bytes = 0

    @property
    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        self.expect(len(data))
        self.tar_bytes += len(data)
        self._hash.update(data)
        self._writer.write(data)

    def expect(self, size: int) -> None:
        """Refuse what would not fit before any of it is read: a hole of a terabyte costs nothing to make."""
        if self.tar_bytes + size > self._max:
            raise LayerError(
                f"the changes take more than {self._max} bytes: exclude paths or raise the limit",
                boundary="layers", content=True,
            )  # fmt: skip

    def finish(self) -> None:
        self.write(END)
        self._writer.flush(zstandard.FLUSH_FRAME)


class _Stream:
    """Decompresses, hashes and counts what is read."""

    def __init__(self, source: BinaryIO, max_bytes: int) -> None:
        self._hash = hashlib.sha256()
        self._reader = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).stream_reader(source, closefd=False)
        self._left = self._max = max_bytes

    @property
    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()

    def read(self, size: int) -> bytes:
        """Exactly so many bytes, fewer only at the end."""
        parts = []
        while size and (data := self._reader.read(size)):
            size -= len(data)
            self._left -= len(data)
            if self._left < 0:
                raise LayerError(f"the layer unpacks to more than {self._max} bytes", boundary="layers")
            self._hash.update(data)
            parts.append(data)
        return b"".join(parts) if len(parts) != 1 else parts[0]
