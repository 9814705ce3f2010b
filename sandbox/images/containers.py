"""Docker and OCI images, in an archive or a layout directory: which layers in which order, and what they configure."""

from __future__ import annotations

import platform
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol, cast

import msgspec

from sandbox.errors import ImageError
from sandbox.images.streams import HashingReader

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_MAX_JSON = 16 * 1024 * 1024
_MAX_NESTED = 4
_OF_ROOTS = frozenset({"bin", "dev", "etc", "home", "lib", "opt", "proc", "root", "sbin", "sys", "tmp", "usr", "var"})
_UNREADABLE = (
    KeyError, IndexError, TypeError, AttributeError, ValueError, OSError, RecursionError, tarfile.TarError,
    msgspec.MsgspecError,
)  # fmt: skip
"""What manifests of any form may lead to; recursion by JSON nested without end, or a link to itself."""


class Configured(msgspec.Struct, frozen=True):
    """What an image says about the processes in it: variables and the directory where they start."""

    env: dict[str, str] = {}
    workdir: str | None = None


class Layer(msgspec.Struct, frozen=True):
    """One layer: where its blob is, and the digest that it must have, if one is known."""

    name: str
    digest: str | None = None


class Blobs(Protocol):
    """Named blobs of one image."""

    def has(self, name: str) -> bool:
        """Whether there is one."""
        ...

    def open(self, name: str) -> BinaryIO:
        """One for reading; raises KeyError or OSError where there is none."""
        ...


class DirectoryBlobs:
    """The files of an OCI layout directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def has(self, name: str) -> bool:
        """See `Blobs.has`."""
        return (self._root / name).is_file()

    def open(self, name: str) -> BinaryIO:
        """See `Blobs.open`."""
        if ".." in PurePosixPath(name).parts or name.startswith("/"):
            raise KeyError(name)
        return (self._root / name).open("rb")


class ArchiveBlobs:
    """The members of an uncompressed tar file."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive
        self._names = {name.removeprefix("./") for name in archive.getnames()}

    def has(self, name: str) -> bool:
        """See `Blobs.has`."""
        return name in self._names

    def open(self, name: str) -> BinaryIO:
        """See `Blobs.open`."""
        for wanted in (name, f"./{name}"):
            try:
                found = self._archive.extractfile(wanted)
            except KeyError:
                continue
            if found is not None:
                return cast(BinaryIO, found)
        raise KeyError(name)


def holds_container(archive: tarfile.TarFile) -> bool:
    """Whether a tar is a saved container image: it has a manifest, and nothing of a root file system beside it."""
    found = False
    for info in archive:
        parts = PurePosixPath(info.name).parts
        if not parts:
            continue
        if parts[0] in ("manifest.json", "index.json"):
            found = True
        elif parts[0] in _OF_ROOTS:
            return False
    return found


def read_container(blobs: Blobs, what: str) -> tuple[list[Layer], Configured]:
    """The layers, lowest first, and the configuration.

    Raises:
        ImageError: it is no Docker or OCI image, or has none for this machine's architecture.
    """
    try:
        if blobs.has("index.json") and blobs.has("oci-layout"):
            return _read_oci(blobs, what)
        if blobs.has("manifest.json"):
            return _read_docker(blobs, what)
    except _UNREADABLE as error:
        raise ImageError(f"{what} is no complete image: {type(error).__name__} {error}", boundary="images") from error
    raise ImageError(f"{what} has neither an index.json of OCI nor a manifest.json of `docker save`", boundary="images")


@contextmanager
def opened_layer(blobs: Blobs, layer: Layer, what: str) -> Iterator[HashingReader]:
    """A layer's blob, checked against its digest once it was read.

    Raises:
        ImageError: it is not there, or not what its digest says.
    """
    try:
        source = blobs.open(layer.name)
    except _UNREADABLE as error:
        raise ImageError(f"{what} lacks its layer {layer.name}", boundary="images") from error
    with source:
        reader = HashingReader(source)
        yield reader
        found = reader.digest()
    if layer.digest is not None and layer.digest != found:
        raise ImageError(f"{what}: layer {layer.digest} is damaged, it reads as {found}", boundary="images")


def _read_docker(blobs: Blobs, what: str) -> tuple[list[Layer], Configured]:
    manifests = _json(blobs, "manifest.json")
    if len(manifests) != 1:
        tags = [", ".join(one.get("RepoTags") or []) for one in manifests]
        raise ImageError(f"{what} holds {len(manifests)} images ({'; '.join(tags)}): save one alone", boundary="images")
    manifest = manifests[0]
    return [Layer(name) for name in manifest["Layers"]], _configured(_json(blobs, manifest["Config"]))


def _read_oci(blobs: Blobs, what: str) -> tuple[list[Layer], Configured]:
    document = _json(blobs, "index.json")
    for _ in range(_MAX_NESTED):
        if "layers" in document:
            layers = [Layer(_blob(one["digest"]), one["digest"]) for one in document["layers"]]
            return layers, _configured(_json(blobs, _blob(document["config"]["digest"])))
        document = _json(blobs, _blob(_for_this_machine(document["manifests"], what)["digest"]))
    raise ImageError(f"{what}: its indexes are nested deeper than {_MAX_NESTED}", boundary="images")


def _for_this_machine(manifests: list[dict[str, Any]], what: str) -> dict[str, Any]:
    wanted = _MACHINES.get(platform.machine(), platform.machine())
    known = [one for one in manifests if (one.get("platform") or {}).get("os") != "unknown"]  # attestations
    fitting = [one for one in known if (one.get("platform") or {}).get("architecture", wanted) == wanted]
    if len(fitting) != 1:
        raise ImageError(f"{what} holds {len(fitting)} images for {wanted}: save one alone", boundary="images")
    return fitting[0]


def _configured(document: dict[str, Any]) -> Configured:
    config = document.get("config") or {}
    lines, workdir = config.get("Env") or [], config.get("WorkingDir") or None
    if any(not isinstance(text, str) or "\0" in text for text in (*lines, workdir or "")):
        raise ValueError("Env and WorkingDir must be texts without NUL")
    pairs = [line.partition("=") for line in lines]
    return Configured({name: value for name, _, value in pairs if name.isidentifier()}, workdir)


def _json(blobs: Blobs, name: str) -> Any:
    with blobs.open(name) as file:
        return msgspec.json.decode(file.read(_MAX_JSON))


def _blob(digest: str) -> str:
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or not _is_hex(value):
        raise KeyError(digest)
    return f"blobs/sha256/{value}"


def _is_hex(text: str) -> bool:
    return len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)
