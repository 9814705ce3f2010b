"""The image store: packed root file systems by digest and by name on the shared filesystem, unpacked once a node."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import msgspec

from sandbox.errors import ImageError
from sandbox.hostroot import host_digest
from sandbox.images.pack import MAX_BYTES, MAX_ENTRIES, PackedImage, pack_image
from sandbox.layers import unpack, verify
from stages import sharedfs
from stages.layout import StoreLayout

HOST = "host"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,119}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LONGEST_FILE = 160
"""Characters of a name's file: 255 less what the name of a temporary file beside it adds."""
_COPY_BYTES = 8 * 1024 * 1024
_SHOWN_NAMES = 8


class ImageConfig(msgspec.Struct, frozen=True):
    """images/<sha256>.json: what an image says of itself beside its files.

    Args:
        env: variables of every process in it, as Docker's ENV.
        workdir: where its processes start; for people, the task decides.
        size_bytes: of the packed file.
        tar_bytes: of the uncompressed tar.
        entries: names in it.
    """

    env: dict[str, str]
    workdir: str | None
    size_bytes: int
    tar_bytes: int
    entries: int


class ImageName(msgspec.Struct, frozen=True):
    """images/names/<name>.json: what a name means, where it came from, and when (seconds since 1970)."""

    name: str
    digest: str
    source: str
    imported_at: float


class UnpackedImage(msgspec.Struct, frozen=True):
    """An image ready for sandboxes on this node: `SandboxSpec.image`, and the variables of its processes."""

    root: str
    env: dict[str, str] = {}


class Imported(msgspec.Struct, frozen=True):
    """What an import brought: the name's record, and devices, FIFOs and sockets that were left out."""

    name: ImageName
    config: ImageConfig
    dropped: int


class ImageStore:
    """Images of one store, with a node-local directory for unpacked ones. All calls block: use them in threads.

    Args:
        layout: the store.
        node_dir: on this node, made where missing; None where nothing is unpacked.
    """

    def __init__(self, layout: StoreLayout, node_dir: Path | None = None) -> None:
        self._layout, self._node_dir = layout, node_dir

    def add(self, name: str, source: Path, *, replace: bool = False, scratch: Path | None = None) -> Imported:
        """Import an image under a name; many may do so at once.

        Args:
            name: letters, digits and `._:/@+-`; not "host" and no digest.
            source: see `pack_image`.
            replace: let a name that is there mean the new content.
            scratch: directory on a local disk; by default the system's temporary directory.

        Raises:
            ImageError: the name or the source is refused, or the name means something else already.
        """
        if not _NAME.fullmatch(name) or name == HOST or _DIGEST.fullmatch(name):
            raise ImageError(
                f"{name!r} is no image name: use letters, digits and ._:/@+- (not {HOST!r}, no digest)",
                boundary="images",
            )
        file = self._layout.image_name(name).name
        if len(file) > _LONGEST_FILE:
            raise ImageError(
                f"{name!r} is too long for a name: its file {file[:20]}... would have {len(file)} characters, "
                f"the most is {_LONGEST_FILE}: use fewer of /:@+",
                boundary="images",
            )
        with _scratch(scratch) as place:
            packed = pack_image(source, Path(place) / "image.tar.zst", Path(place))
            with self._written():
                for directory in self._layout.directories:
                    sharedfs.make_dirs(directory)
                config = self._publish(packed)
        record = ImageName(name, packed.layer.digest, str(source.absolute()), time.time())
        with self._written():
            self._name(record, replace)
        return Imported(record, config, packed.dropped)

    def names(self) -> list[tuple[ImageName, ImageConfig]]:
        """Every name with what it means, sorted."""
        try:
            files = sharedfs.list_dir(self._layout.image_names)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ImageError(
                f"{self._layout.root} cannot be read as a store: {error.strerror}: give another --store",
                boundary="images",
            ) from error
        found = sorted(unquote(file.removesuffix(".json")) for file in files if file.endswith(".json"))
        records = [self._record(name) for name in found if not name.startswith(".")]
        return [(record, self._config(record.digest)) for record in records if record is not None]

    def check(self, image: str) -> str:
        """Read an image's whole blob and compare it with its digest, which is returned.

        Raises:
            ImageError: it is not in the store, or damaged.
        """
        digest = self._named(image)
        with self._blob(digest).open("rb") as file:
            verify(file, digest, max_bytes=2 * MAX_BYTES)
        return digest

    def digest(self, image: str) -> str:
        """What tells one image from another in an environment's key: content and configuration.

        Args:
            image: "host", a name, "sha256:<hex>", or the absolute path of an unpacked root file system.

        Raises:
            ImageError: there is no such image; one line that says what there is.
        """
        if image == HOST:
            return host_digest()
        if image.startswith("/"):
            _checked_directory(image)
            return host_digest(Path(image)) + hashlib.sha256(image.encode()).hexdigest()
        digest = self._named(image)
        config = self._config(digest)
        if not config.env:
            return digest
        return f"{digest}+{hashlib.sha256(msgspec.json.encode(config.env, order='sorted')).hexdigest()[:16]}"

    def unpacked(self, image: str) -> UnpackedImage:
        """The image for sandboxes of this node, unpacked now if no one has before.

        Args:
            image: as of `digest`.

        Raises:
            ImageError: there is no such image.
            SandboxError: its blob is damaged.
        """
        if image == HOST:
            return UnpackedImage(HOST)
        if image.startswith("/"):
            return UnpackedImage(_checked_directory(image))
        assert self._node_dir is not None, "this store was opened without a node's directory"
        digest = self._named(image)
        directory = self._node_dir / _hex(digest)
        if not directory.exists():
            self._node_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self._node_dir / f"{_hex(digest)}.lock"):
                if not directory.exists():
                    with self._blob(digest).open("rb") as file:
                        unpack(file, directory, digest=digest, max_bytes=2 * MAX_BYTES, max_entries=2 * MAX_ENTRIES)
        return UnpackedImage(str(directory), self._config(digest).env)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Say of what goes wrong that the store cannot be written."""
        try:
            yield
        except (OSError, RecursionError) as error:  # recursion: a place where no directory can be, such as /proc
            why = error.strerror if isinstance(error, OSError) and error.strerror else "no directory can be made there"
            raise ImageError(
                f"the store {self._layout.root} cannot be written: {why}: give a directory of yours as --store",
                boundary="images",
            ) from error

    def _publish(self, packed: PackedImage) -> ImageConfig:
        """Put the blob and its configuration into the store; the first configuration of a content stays."""
        sha256 = _hex(packed.layer.digest)
        blob = self._layout.image_blob(sha256)
        if not sharedfs.exists(blob):
            with Path(packed.layer.path).open("rb") as source, sharedfs.atomic_file(blob) as target:
                while chunk := source.read(_COPY_BYTES):
                    target.append(chunk)
        size = sharedfs.stat_size(blob)
        config = ImageConfig(
            packed.configured.env, packed.configured.workdir, size, packed.layer.tar_bytes, packed.layer.entries
        )
        self._create(self._layout.image_config(sha256), msgspec.json.encode(config))
        return self._config(packed.layer.digest)

    def _name(self, record: ImageName, replace: bool) -> None:
        path = self._layout.image_name(record.name)
        if replace:
            sharedfs.write_atomic(path, msgspec.json.encode(record))
            return
        if self._create(path, msgspec.json.encode(record)):
            return
        there = self._record(record.name)
        if there is not None and there.digest != record.digest:
            raise ImageError(
                f"{record.name} is {there.digest} already, and {record.source} is {record.digest}: "
                "choose another name, or give --replace where no run uses it",
                boundary="images",
            )

    def _create(self, path: Path, data: bytes) -> bool:
        """Make a file that appears whole; False where one is there already."""
        private = sharedfs.temp_beside(path)
        sharedfs.create_exclusive(private, data)
        try:
            return sharedfs.link(private, path)
        finally:
            sharedfs.unlink(private)

    def _record(self, name: str) -> ImageName | None:
        path = self._layout.image_name(name)
        try:
            return msgspec.json.decode(sharedfs.read_bytes(path), type=ImageName)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # a name that could not be given
                return None
            raise
        except msgspec.MsgspecError as error:
            raise ImageError(
                f"{path} is damaged: {error}; import {name} again with --replace", boundary="images"
            ) from error

    def _config(self, digest: str) -> ImageConfig:
        path = self._layout.image_config(_hex(digest))
        try:
            return msgspec.json.decode(sharedfs.read_bytes(path), type=ImageConfig)
        except FileNotFoundError as error:
            raise self._missing(digest) from error
        except msgspec.MsgspecError as error:
            raise ImageError(f"{path} is damaged: {error}; remove it and import again", boundary="images") from error

    def _named(self, image: str) -> str:
        """The digest of a name or of a digest that is in the store."""
        if _DIGEST.fullmatch(image):
            if not sharedfs.exists(self._layout.image_blob(_hex(image))):
                raise self._missing(image)
            return image
        record = self._record(image) if _NAME.fullmatch(image) else None
        if record is None:
            raise self._missing(image)
        return record.digest

    def _missing(self, image: str) -> ImageError:
        names = [record.name for record, _ in self.names()] if not _DIGEST.fullmatch(image) else []
        there = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
        return ImageError(
            f"no image {image!r} in {self._layout.images}; there is {there or 'none'}: "
            f"rollmill images import NAME SOURCE --store {self._layout.root}",
            boundary="images",
        )

    def _blob(self, digest: str) -> Path:
        blob = self._layout.image_blob(_hex(digest))
        if not sharedfs.exists(blob):
            raise self._missing(digest)
        return blob


@contextmanager
def _scratch(parent: Path | None) -> Iterator[str]:
    """A directory on a local disk that goes away in the end."""
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="rollmill-image-", dir=parent)
    except OSError as error:
        raise ImageError(
            f"no scratch directory can be made in {parent or tempfile.gettempdir()}: {error.strerror}: "
            "give a directory of yours as --scratch",
            boundary="images",
        ) from error
    with made as place:
        yield place


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process of the node at a time; the lock dies with its holder."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _checked_directory(image: str) -> str:
    if not Path(image).is_dir():
        raise ImageError(f"image {image!r} is no directory on this machine", boundary="images")
    return image


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
