"""Turns a source (directory, tar, Docker or OCI archive, .sif) into one packed root file system with a digest."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from sandbox.errors import ImageError, SandboxError
from sandbox.images.containers import (
    ArchiveBlobs,
    Blobs,
    Configured,
    DirectoryBlobs,
    holds_container,
    opened_layer,
    read_container,
)
from sandbox.images.members import directory_members, tar_members
from sandbox.images.rootwriter import RootWriter
from sandbox.images.streams import is_sif, opened, plain
from sandbox.layers import pack
from sandbox.protocols import PackedLayer
from sandbox.scratch import make_private, remove_tree

MAX_BYTES = 64 * 1024**3
MAX_ENTRIES = 4_000_000
_SIF_TIMEOUT_S = 1800.0
_SIF_ENV = ".singularity.d/env/10-docker2singularity.sh"
_EXPORT = re.compile(r'^export (\w+)="(?:\$\{\1:-"?)?([^"$`\\]*)"?\}?"$', re.MULTILINE)


class PackedImage(msgspec.Struct, frozen=True):
    """An image as one file: its layer, what it configures, and how many devices, FIFOs and sockets were left out."""

    layer: PackedLayer
    configured: Configured
    dropped: int


def pack_image(source: Path, out_file: Path, scratch: Path) -> PackedImage:
    """Read an image and write its root file system in the layer format. Blocks, for minutes where it is large.

    The digest is of the content alone: the same root file system has the same digest, however it came.

    Args:
        source: a root file system directory; a tar of one; a Docker archive or OCI archive or layout; a .sif. Archives
            may be compressed by gzip, bzip2, xz or zstd.
        out_file: appears whole or not at all.
        scratch: directory on a local disk for what lies there meanwhile.

    Raises:
        ImageError: the source cannot be read, is hostile, or has no bash; one line.
    """
    home = make_private(scratch, "image-")
    try:
        configured, dropped = read_image(source, home / "root", home)
        with one_line_errors(source):
            return pack_root(home / "root", out_file, configured, dropped)
    finally:
        remove_tree(home)


def read_image(source: Path, root: Path, home: Path) -> tuple[Configured, int]:
    """Lay an image out as a root file system; what it configures, and how many devices and such were left out.

    Args:
        source: as of `pack_image`.
        root: a new directory.
        home: a private directory on a local disk for what lies there meanwhile.

    Raises:
        ImageError: as of `pack_image`.
    """
    with one_line_errors(source):
        root.mkdir(mode=0o700)
        root.chmod(0o755)
        writer = RootWriter(root, str(source), max_bytes=MAX_BYTES, max_entries=MAX_ENTRIES)
        configured = _read(source, writer, home)
        writer.finish()
        return configured, writer.dropped


def pack_root(root: Path, out_file: Path, configured: Configured, dropped: int = 0) -> PackedImage:
    """Write a root file system that `RootWriter` made in the layer format."""
    return PackedImage(pack({b"": root}, out_file, max_bytes=2 * MAX_BYTES), configured, dropped)


@contextmanager
def one_line_errors(source: Path) -> Iterator[None]:
    """Turn what goes wrong with an image into one printable line."""
    try:
        yield
    except SandboxError as error:
        if str(error).isprintable():
            raise
        raise ImageError(_one_line(str(error)), boundary="images") from error
    except (OSError, ValueError, RecursionError, tarfile.TarError) as error:
        said = _one_line(f"{source} cannot be imported: {error}")
        raise ImageError(said, boundary="images") from error


def _one_line(text: str) -> str:
    """A message without line ends and control characters, which names in an image may hold."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _read(source: Path, writer: RootWriter, home: Path) -> Configured:
    if source.is_dir():
        if (source / "oci-layout").is_file():
            return _container(DirectoryBlobs(source), writer, str(source))
        writer.apply(directory_members(source, str(source)), whiteouts=False)
        return Configured()
    if not source.exists():
        raise ImageError(f"{source} does not exist", boundary="images")
    if not source.is_file():
        raise ImageError(f"{source} is neither a directory nor a file", boundary="images")
    with opened(source) as reader:
        if is_sif(reader.peek(64)):
            return _sif(source, writer, home)
    if _is_container(source):
        with _archive(source, home) as archive:
            return _container(ArchiveBlobs(archive), writer, str(source))
    with opened(source) as reader, plain(reader, str(source)) as stream:
        writer.apply(tar_members(stream, str(source)), whiteouts=False)
    return Configured()


def _is_container(source: Path) -> bool:
    with opened(source) as reader, plain(reader, str(source)) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|", encoding="utf-8", errors="surrogateescape") as archive:
                return holds_container(archive)
        except (tarfile.TarError, EOFError) as error:
            raise ImageError(f"{source} cannot be read as a tar archive: {error}", boundary="images") from error


def _archive(source: Path, home: Path) -> tarfile.TarFile:
    """The archive open for reading in any order; a compressed one is decompressed first."""
    with opened(source) as reader, plain(reader, str(source)) as stream:
        if stream is not reader:  # type: ignore[comparison-overlap]
            whole = home / "archive.tar"
            with whole.open("xb") as file:
                shutil.copyfileobj(stream, file, 1024 * 1024)
            source = whole
    return tarfile.open(source, mode="r:", encoding="utf-8", errors="surrogateescape")


def _container(blobs: Blobs, writer: RootWriter, what: str) -> Configured:
    layers, configured = read_container(blobs, what)
    for layer in layers:
        named = f"{what}: layer {layer.name}"
        with opened_layer(blobs, layer, what) as reader, plain(reader, named) as stream:
            writer.apply(tar_members(stream, named), whiteouts=True)
    return configured


def _sif(source: Path, writer: RootWriter, home: Path) -> Configured:
    """Have Apptainer unpack its own format."""
    if shutil.which("apptainer") is None:
        raise ImageError(f"{source} is a .sif: reading it needs apptainer in PATH", boundary="images")
    unpacked = home / "sif"
    command = ["apptainer", "--silent", "--nocolor", "build", "--sandbox", str(unpacked), str(source.absolute())]
    env = {
        "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"), "HOME": str(home),
        "APPTAINER_TMPDIR": str(home), "APPTAINER_CACHEDIR": str(home / "cache"),
        "APPTAINER_CONFIGDIR": str(home / "config"),
    }  # fmt: skip
    # A root that lacks a capability (as in a container) is refused by Apptainer; in a user namespace it has them all.
    for before in ((), ("unshare", "--user", "--map-root-user", "--")):
        remove_tree(unpacked)
        said = _complaint([*before, *command], env, home)
        if said is None:
            break
    else:
        raise ImageError(f"apptainer cannot unpack {source}: {said}", boundary="images")
    writer.apply(directory_members(unpacked, str(source)), whiteouts=False)
    script = unpacked / _SIF_ENV
    text = script.read_text(errors="replace") if script.is_file() and not script.is_symlink() else ""
    return Configured(dict(_EXPORT.findall(text)))


def _complaint(command: list[str], env: dict[str, str], cwd: Path) -> str | None:
    """Run a command; what it said where it failed."""
    try:
        done = subprocess.run(
            command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=_SIF_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done within {_SIF_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return None
    said = "".join(one for one in done.stdout.decode("utf-8", "replace") if one.isprintable() or one.isspace())
    return " ".join(said.split())[-400:] or f"it ended with {done.returncode} and said nothing"
