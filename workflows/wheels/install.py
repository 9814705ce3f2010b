"""Unpacks wheels as an installer would, into a list of files below a prefix; nothing of a wheel is ever run here.

The layout is that of a virtual environment (PEP 405): `bin/`, `pyvenv.cfg`, `lib/pythonX.Y/site-packages`. Source: the
specification of binary distributions (PEP 427) for `.data` directories, that of entry points for scripts.
"""

from __future__ import annotations

import configparser
import io
import zipfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

import msgspec

from workflows.wheels.errors import WheelError

MAX_UNPACKED: Final = 4 << 30


class Entry(msgspec.Struct, frozen=True):
    """One file to write: its path below the prefix, its content, whether it can be run."""

    path: str
    data: bytes
    executable: bool = False


def site_packages(version: str) -> str:
    """The directory of packages below a prefix, for a Python "3.11"."""
    return f"lib/python{version}/site-packages"


def unpack(name: str, wheel: bytes, *, version: str, interpreter: str) -> Iterator[Entry]:
    """The files of one wheel.

    Args:
        name: of its file, for messages.
        wheel: its bytes.
        version: "3.11".
        interpreter: absolute path that scripts begin with.

    Raises:
        WheelError: it is no wheel, too large, or names a place outside the prefix.
    """
    site = site_packages(version)
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            if sum(member.file_size for member in members) > MAX_UNPACKED:
                raise WheelError(f"{name} unpacks to more than {MAX_UNPACKED} bytes")
            for member in members:
                data = archive.read(member)
                yield _placed(name, member, data, site, interpreter)
                if member.filename.endswith(".dist-info/entry_points.txt"):
                    yield from _scripts(data.decode(), interpreter)
    except (zipfile.BadZipFile, UnicodeDecodeError, configparser.Error) as error:
        raise WheelError(f"{name} is no wheel: {error}") from error


def _placed(name: str, member: zipfile.ZipInfo, data: bytes, site: str, interpreter: str) -> Entry:
    parts = PurePosixPath(member.filename).parts
    if not parts or parts[0] == "/" or ".." in parts or "\\" in member.filename or "\0" in member.filename:
        raise WheelError(f"{name}: {member.filename!r} leads out of the wheel")
    executable = bool((member.external_attr >> 16) & 0o111)
    if not parts[0].endswith(".data") or len(parts) < 3:
        return Entry("/".join((site, *parts)), data, executable)
    kind, rest = parts[1], parts[2:]
    if kind in ("purelib", "platlib"):
        return Entry("/".join((site, *rest)), data, executable)
    if kind == "scripts":
        first, newline, body = data.partition(b"\n")
        if first.startswith(b"#!python"):
            data = f"#!{interpreter}".encode() + newline + body
        return Entry("/".join(("bin", *rest)), data, True)
    if kind == "headers":
        return Entry("/".join(("include", *rest)), data, executable)
    if kind == "data":
        return Entry("/".join(rest), data, executable)
    raise WheelError(f"{name}: {member.filename!r}: no such place as {kind!r}")


def script(name: str, value: str, interpreter: str) -> Entry | None:
    """The command of an entry point `module:function`; None where it is none or its name is no file's.

    Args:
        name: of the command.
        value: as in entry_points.txt; extras are passed over.
        interpreter: absolute path that it begins with.
    """
    module, _, function = value.split("[")[0].strip().partition(":")
    parts = [*module.split("."), *function.split(".")]
    if "/" in name or name.startswith(".") or not name or not all(part.strip().isidentifier() for part in parts):
        return None
    text = f"#!{interpreter}\nimport sys\nfrom {module} import {parts[module.count('.') + 1]}\nsys.exit({function}())\n"
    return Entry(f"bin/{name}", text.encode(), True)


def _scripts(entry_points: str, interpreter: str) -> Iterator[Entry]:
    parser = configparser.RawConfigParser(delimiters=("=",), strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(entry_points)
    for group in ("console_scripts", "gui_scripts"):
        for name, value in parser.items(group) if parser.has_section(group) else ():
            made = script(name, value, interpreter)
            if made is not None:
                yield made
