"""The layer's tar dialect: one canonical encoding of each entry, and a reader that accepts nothing else. Pure.

POSIX ustar headers written by hand, because the digest must not change with a library's version: numeric owner 0:0
without names, one constant time, names as raw bytes, a PAX header only where a name, link or size does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from sandbox.errors import LayerError

Kind = Literal["file", "directory", "symlink", "hardlink"]

BLOCK = 512
MTIME = 946684800
"""2000-01-01T00:00:00Z: one time for everything; late enough for zip, which knows none before 1980."""
END = bytes(2 * BLOCK)

_FLAG: dict[Kind, bytes] = {"file": b"0", "hardlink": b"1", "symlink": b"2", "directory": b"5"}
_KIND = {flag: kind for kind, flag in _FLAG.items()}
_FIELD = 100
_LARGEST_OCTAL = 8**11
_LARGEST_PAX = 256 * 1024


class Entry(msgspec.Struct, frozen=True):
    """One name of a layer.

    Args:
        path: relative to the root, no leading or trailing slash, raw bytes.
        kind: what it is.
        mode: permission bits and the sticky bit; never setuid or setgid.
        size: bytes of a file's content; 0 otherwise.
        target: of a symlink as it stands; of a hard link the path of an earlier file.
    """

    path: bytes
    kind: Kind
    mode: int = 0o644
    size: int = 0
    target: bytes = b""


def encode(entry: Entry) -> bytes:
    """The entry's header, with a PAX header before it where it needs one; a multiple of 512 bytes."""
    name = entry.path + (b"/" if entry.kind == "directory" else b"")
    records = b""
    if len(name) > _FIELD:
        records += _record(b"path", name)
    if len(entry.target) > _FIELD:
        records += _record(b"linkpath", entry.target)
    if entry.size >= _LARGEST_OCTAL:
        records += _record(b"size", b"%d" % entry.size)
    size = 0 if entry.size >= _LARGEST_OCTAL else entry.size
    header = _header(name[:_FIELD], entry.mode, size, _FLAG[entry.kind], entry.target[:_FIELD])
    if not records:
        return header
    if not _is_text(name + entry.target):
        records = _record(b"hdrcharset", b"BINARY") + records
    return _header(b"pax", 0o644, len(records), b"x", b"") + records + padding(len(records)) + header


def padding(size: int) -> bytes:
    """The zeros that fill the last block after `size` bytes."""
    return bytes(-size % BLOCK)


def read_entries(read: Callable[[int], bytes]) -> Iterator[tuple[Entry, Callable[[int], bytes]]]:
    """The entries of a tar of this dialect, each with a reader of its content; what is left unread is skipped.

    Args:
        read: gives exactly so many bytes, or fewer at the end.

    Raises:
        LayerError: the stream is no layer, or ends early.
    """
    while True:
        block = _exactly(read, BLOCK)
        if block == bytes(BLOCK):
            if _exactly(read, BLOCK) != bytes(BLOCK) or read(1):
                raise LayerError("the layer goes on after its end", boundary="layers")
            return
        records: dict[bytes, bytes] = {}
        if block[156:157] == b"x":
            records = _read_records(block, read)
            block = _exactly(read, BLOCK)
        entry = _decode(block, records)
        content = _Content(read, entry.size)
        yield entry, content.take
        content.skip()


class _Content:
    """The bytes of one file within the stream."""

    def __init__(self, read: Callable[[int], bytes], size: int) -> None:
        self._read, self._left, self._padding = read, size, -size % BLOCK

    def take(self, most: int) -> bytes:
        data = self._read(min(most, self._left))
        self._left -= len(data)
        if not data and self._left and most:
            raise LayerError(f"the layer ends {self._left} bytes before a file does", boundary="layers")
        return data

    def skip(self) -> None:
        while self._left:
            self.take(1024 * 1024)
        if _exactly(self._read, self._padding) != bytes(self._padding):
            raise LayerError("bytes after a file are not zero", boundary="layers")


def _header(name: bytes, mode: int, size: int, flag: bytes, target: bytes) -> bytes:
    head = name.ljust(_FIELD, b"\0") + b"%07o\0" % mode + b"0000000\0" * 2 + b"%011o\0" % size + b"%011o\0" % MTIME
    tail = flag + target.ljust(_FIELD, b"\0") + b"ustar\x0000" + bytes(64) + b"0000000\0" * 2
    block = (head + b" " * 8 + tail).ljust(BLOCK, b"\0")
    return head + b"%06o\0 " % sum(block) + block[156:]


def _record(key: bytes, value: bytes) -> bytes:
    """A PAX record; its length counts its own digits."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


def _is_text(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def _exactly(read: Callable[[int], bytes], size: int) -> bytes:
    data = read(size) if size else b""
    if len(data) != size:
        raise LayerError("the layer ends in the middle of an entry", boundary="layers")
    return data


def _number(field: bytes) -> int:
    digits = field.rstrip(b"\0 ") or b"0"
    if digits.strip(b"01234567"):  # what int() takes beside digits: a sign, an underscore, a prefix
        raise LayerError(f"a header's number is {field!r}", boundary="layers")
    return int(digits, 8)


def _checked(block: bytes) -> None:
    if block[257:265] != b"ustar\x0000":
        raise LayerError("not a layer: a header has no ustar mark", boundary="layers")
    if _number(block[148:156]) != sum(block[:148]) + 8 * 32 + sum(block[156:]):
        raise LayerError("a header's checksum is wrong", boundary="layers")


def _read_records(block: bytes, read: Callable[[int], bytes]) -> dict[bytes, bytes]:
    _checked(block)
    size = _number(block[124:136])
    if size > _LARGEST_PAX:
        raise LayerError(f"an extended header has {size} bytes; at most {_LARGEST_PAX} are taken", boundary="layers")
    data = _exactly(read, size)
    _exactly(read, -size % BLOCK)
    records: dict[bytes, bytes] = {}
    while data:
        digits, _, _ = data.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 10 else 0
        key, equals, value = data[len(digits) + 1 : length - 1].partition(b"=")
        if not length or not equals or data[length - 1 : length] != b"\n":
            raise LayerError("an extended header cannot be read", boundary="layers")
        if key not in (b"path", b"linkpath", b"size", b"hdrcharset"):
            raise LayerError(f"an extended header holds {key!r}, which no layer has", boundary="layers")
        records[key] = value
        data = data[length:]
    return records


def _decode(block: bytes, records: dict[bytes, bytes]) -> Entry:
    _checked(block)
    kind = _KIND.get(block[156:157])
    if kind is None:
        raise LayerError(
            f"an entry has type {block[156:157]!r}; a layer holds files, directories and links only", boundary="layers"
        )
    path = records.get(b"path", block[:_FIELD].rstrip(b"\0"))
    target = records.get(b"linkpath", block[157 : 157 + _FIELD].rstrip(b"\0"))
    size = int(records[b"size"]) if records.get(b"size", b"").isdigit() else _number(block[124:136])
    if kind == "directory" and path.endswith(b"/"):
        path = path[:-1]
    if size and kind != "file":
        raise LayerError(f"{path!r} is a {kind} with content", boundary="layers")
    return Entry(path, kind, _number(block[100:108]), size, target)
