"""Compressed streams by their first bytes: gzip, bzip2, xz, zstd, or none."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from sandbox.errors import ImageError
from sandbox.layers import DamagedStream, decompressed

_ZSTD = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = b"\x2a\x4d\x18"
_SIF_MAGIC_AT, _SIF_MAGIC = 32, b"SIF_MAGIC"
_HEAD = 64
_DAMAGED = (EOFError, ValueError, lzma.LZMAError, zlib.error, DamagedStream)


class HashingReader:
    """Reads on from another stream and hashes what passes; can start over as long as little was read.

    Args:
        source: the stream.
    """

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._hash = hashlib.sha256()
        self._ahead = b""

    def peek(self, size: int) -> bytes:
        """The next bytes, which the next read gives again."""
        self._ahead += self._take(size - len(self._ahead)) if size > len(self._ahead) else b""
        return self._ahead[:size]

    def read(self, size: int = -1) -> bytes:
        """As of any stream."""
        if size < 0:
            data, self._ahead = self._ahead, b""
            return data + self._take(-1)
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return data or self._take(size)

    def digest(self) -> str:
        """sha256 of the whole stream, what was not read yet included."""
        while self._take(1024 * 1024):
            pass
        return "sha256:" + self._hash.hexdigest()

    def readable(self) -> bool:
        """As of any stream."""
        return True

    def _take(self, size: int) -> bytes:
        data = self._source.read(size)
        self._hash.update(data)
        return data


class _Plain:
    """Reads a decompressor, whose errors it tells from those of the file system and of who reads."""

    def __init__(self, source: BinaryIO, what: str) -> None:
        self._source, self._what = source, what

    def read(self, size: int = -1) -> bytes:
        """As of any stream; ImageError where the data is damaged."""
        try:
            return self._source.read(size)
        except _DAMAGED as error:
            raise self._damaged(error) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise self._damaged(error) from error  # how gzip and bzip2 say it

    def _damaged(self, error: Exception) -> ImageError:
        return ImageError(f"{self._what} is damaged: {error}", boundary="images")


def is_sif(head: bytes) -> bool:
    """The first bytes are those of a Singularity image file."""
    return head[_SIF_MAGIC_AT : _SIF_MAGIC_AT + len(_SIF_MAGIC)] == _SIF_MAGIC


def _checked(stream: object, what: str) -> BinaryIO:
    return cast(BinaryIO, _Plain(cast(BinaryIO, stream), what))


@contextmanager
def plain(reader: HashingReader, what: str) -> Iterator[BinaryIO]:
    """The stream without its compression.

    Raises:
        ImageError: the compressed data is damaged.
    """
    head = reader.peek(_HEAD)
    source = cast(BinaryIO, reader)
    try:
        if head.startswith(b"\x1f\x8b"):
            with gzip.open(source) as stream:
                yield _checked(stream, what)
        elif head.startswith(b"BZh"):
            with bz2.open(source) as stream:
                yield _checked(stream, what)
        elif head.startswith(b"\xfd7zXZ"):
            with lzma.open(source) as stream:
                yield _checked(stream, what)
        elif head.startswith(_ZSTD) or head[1:4] == _SKIPPABLE:
            yield _checked(decompressed(source), what)
        else:
            yield source
    except _DAMAGED as error:
        raise ImageError(f"{what} is damaged: {error}", boundary="images") from error


@contextmanager
def opened(path: Path) -> Iterator[HashingReader]:
    """A file to be read once.

    Raises:
        ImageError: it cannot be opened.
    """
    try:
        with path.open("rb") as file:
            yield HashingReader(file)
    except OSError as error:
        raise ImageError(f"{path} cannot be read: {error.strerror}", boundary="images") from error
