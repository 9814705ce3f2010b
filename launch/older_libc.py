"""Lets a program built against a newer glibc run on this one, where it needs no more of the newer than number parsing.

A program that is compiled with headers of glibc >= 2.38 imports `__isoc23_strtol` and its sisters, which parse as C23
says (they also take "0b1"), where older headers give `strtol`. If that is all that it takes from a newer version, the
imports can be led back to the old names: in the table of dynamic symbols each name is moved to its own tail, its
version to the oldest one in the file, and the newer version's entry to an alias of that. Anything else is refused.

Run as a script by launch/apptainer.sh, with the standard library alone: `python3 launch/older_libc.py DIRECTORY`
"""

from __future__ import annotations

import os
import re
import struct
import sys
from pathlib import Path

MAGIC = b"\x7fELF"
PREFIX = b"__isoc23_"
CARRIED = frozenset(PREFIX + name for name in (b"strtol", b"strtoll", b"strtoul", b"strtoull"))
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NEED, _AUX, _SYMBOL = struct.Struct("<HHIII"), struct.Struct("<IHHII"), struct.Struct("<IBBHQQ")

Version = tuple[int, ...]


class NotCarriedError(Exception):
    """The file needs what cannot be led back, or is no program of this kind."""


class Program:
    """The dynamic tables of one 64-bit little-endian ELF file (System V ABI; symbol versions as of glibc).

    Args:
        data: the whole file, changed in place.
    """

    def __init__(self, data: bytearray) -> None:
        if data[:6] != MAGIC + b"\x02\x01":
            raise NotCarriedError("it is no 64-bit little-endian ELF file")
        self._data = data
        sections = self._sections()
        nothing = (0, 0)
        self._symbols, self._versions = sections.get(b".dynsym", nothing), sections.get(b".gnu.version", nothing)
        self._needs, self._strings = sections.get(b".gnu.version_r", nothing), sections.get(b".dynstr", nothing)

    def lead_back(self, limit: Version) -> list[str]:
        """Change the imports that glibc `limit` lacks; their names.

        Raises:
            NotCarriedError: there is one that cannot be led back.
        """
        needed = self._needed()
        newer = {index for index, (_, version) in needed.items() if version > limit}
        if not newer:
            return []
        oldest = min((index for index in needed if index not in newer), key=lambda index: needed[index][1])
        changed = []
        for number in range(self._symbols[1] // _SYMBOL.size):
            at, version_at = self._symbols[0] + number * _SYMBOL.size, self._versions[0] + 2 * number
            (index,) = struct.unpack_from("<H", self._data, version_at)
            if index & 0x7FFF not in newer:
                continue
            (name_at,) = struct.unpack_from("<I", self._data, at)
            name = self._string(name_at)
            if name not in CARRIED:
                raise NotCarriedError(f"it needs {name.decode()} of a glibc newer than {_shown(limit)}")
            struct.pack_into("<I", self._data, at, name_at + len(PREFIX))
            struct.pack_into("<H", self._data, version_at, oldest)
            changed.append(name.decode())
        hash_of_oldest, _, _, name_of_oldest, _ = _AUX.unpack_from(self._data, needed[oldest][0])
        for index in newer:
            entry, _ = needed[index]
            struct.pack_into("<I", self._data, entry, hash_of_oldest)
            struct.pack_into("<I", self._data, entry + 8, name_of_oldest)
        return changed

    def _sections(self) -> dict[bytes, tuple[int, int]]:
        """Name -> offset and size."""
        (table,) = struct.unpack_from("<Q", self._data, 0x28)
        size, count, names = struct.unpack_from("<HHH", self._data, 0x3A)
        rows = [_SECTION.unpack_from(self._data, table + number * size) for number in range(count)]
        names_at = rows[names][4]
        return {self._text(names_at + row[0]): (row[4], row[5]) for row in rows}

    def _needed(self) -> dict[int, tuple[int, Version]]:
        """Version index -> where its entry is, and the version; of glibc's own versions."""
        found: dict[int, tuple[int, Version]] = {}
        need, size = self._needs
        while size:
            _, count, library, entry_offset, next_offset = _NEED.unpack_from(self._data, need)
            entry = need + entry_offset
            for _ in range(count):
                _, _, index, name, next_entry = _AUX.unpack_from(self._data, entry)
                match = re.fullmatch(rb"GLIBC_(\d+(?:\.\d+)+)", self._string(name))
                if match and self._string(library) == b"libc.so.6":
                    found[index] = (entry, tuple(int(part) for part in match[1].split(b".")))
                entry += next_entry
            if not next_offset:
                break
            need += next_offset
        return found

    def _string(self, offset: int) -> bytes:
        return self._text(self._strings[0] + offset)

    def _text(self, at: int) -> bytes:
        return bytes(self._data[at : self._data.index(0, at)])


def _shown(version: Version) -> str:
    return ".".join(str(part) for part in version)


def main(directory: Path) -> int:
    """Change the programs and libraries below a directory in place; all or none of them."""
    name, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    if name != "glibc":
        sys.stderr.write("older_libc: this machine has no glibc\n")
        return 1
    limit = tuple(int(part) for part in number.split("."))
    changed = {}
    for file in sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()):
        with file.open("rb") as opened:
            if opened.read(4) != MAGIC:
                continue
        data = bytearray(file.read_bytes())
        try:
            names = Program(data).lead_back(limit)
        except NotCarriedError as error:
            sys.stderr.write(f"older_libc: {file}: {error}\n")
            return 1
        if names:
            changed[file] = data, names
    for file, (data, names) in changed.items():
        file.write_bytes(data)
        sys.stdout.write(f"{file}: {', '.join(names)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
