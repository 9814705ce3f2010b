"""The image store: packed root file systems by digest and by name on the shared filesystem, unpacked once a node."""

from __future__ import annotations

import errno
import hashlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import unquote

import msgspec

from sandbox.errors import ImageError
from sandbox.hostroot import host_digest
from sandbox.images.names import store_names
from sandbox.images.pack import MAX_BYTES, MAX_ENTRIES, PackedImage, pack_image
from sandbox.layers import unpack, verify
from sandbox.nodecache import NodeCache
from stages import sharedfs, storefs
from stages.imagerecords import (
    DIGEST,
    HOST,
    NAME,
    ImageConfig,
    ImageName,
    Imported,
    UnpackedImage,
    check_name,
    scratch_directory,
)  # fmt: skip
from stages.layout import StoreLayout
from stages.pacing import turn

_COPY_BYTES = 8 * 1024 * 1024
_SHOWN_NAMES = 8
IMAGE = ".image"
"""What the name of an unpacked image ends with on a node."""
PATIENCE_S = 60.0
"""Longest wait for a turn to unpack."""


class ImageStore:
    """Images of one store, with a node-local directory for unpacked ones. All calls block: use them in threads.

    Args:
        layout: the store.
        node: what this node keeps unpacked; None where nothing is unpacked.
        slots: nodes that unpack at once.
    """

    def __init__(self, layout: StoreLayout, node: NodeCache | None = None, *, slots: int = 8) -> None:
        self._layout, self._node, self._slots = layout, node, slots
        self._used: set[str] = set()

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
        check_name(name, self._layout)
        with scratch_directory(scratch) as place:
            packed = pack_image(source, Path(place) / "image.tar.zst", Path(place))
            return self.publish(name, packed, str(source.absolute()), replace=replace)

    def publish(self, name: str, packed: PackedImage, source: str, *, replace: bool = False) -> Imported:
        """Put a packed image into the store under a name.

        Args:
            name: see `add`.
            packed: as `pack_image` gives it; its file is copied.
            source: for people: what it was made from.
            replace: see `add`.

        Raises:
            ImageError: see `add`.
        """
        check_name(name, self._layout)
        with self._written():
            for directory in self._layout.directories:
                sharedfs.make_dirs(directory)
            config = self._publish(packed)
            configured = packed.configured
            record = ImageName(
                name, packed.layer.digest, source, time.time(), dict(configured.env), configured.workdir
            )  # fmt: skip
            self._name(record, replace)
        return Imported(record, _own(record, config), packed.dropped)

    def has(self, image: str) -> bool:
        """Whether a name or a digest is in the store."""
        try:
            self._named(image)
        except ImageError:
            return False
        return True

    def lay_out(self, image: str, directory: Path) -> ImageConfig:
        """An image's files in a new directory that is the caller's alone; what it says of itself.

        Raises:
            ImageError: it is not in the store, or damaged.
        """
        digest, config = self._meant(image)
        with storefs.reader(self._blob(digest)) as file:
            unpack(file, directory, digest=digest, max_bytes=2 * MAX_BYTES, max_entries=2 * MAX_ENTRIES)
        return config

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
        return [(record, _own(record, self._config(record.digest))) for record in records if record is not None]

    def check(self, image: str) -> str:
        """Read an image's whole blob and compare it with its digest, which is returned.

        Raises:
            ImageError: it is not in the store, or damaged.
        """
        digest = self._named(image)
        with storefs.reader(self._blob(digest)) as file:
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
        digest, config = self._meant(image)
        if digest not in self._used:
            self._used.add(digest)
            storefs.touch(self._layout.image_blob(_hex(digest)))  # a run that asks has begun to use it
        if not config.env:
            return digest
        return f"{digest}+{hashlib.sha256(msgspec.json.encode(config.env, order='sorted')).hexdigest()[:16]}"

    def take(self, image: str, holds: ExitStack) -> UnpackedImage:
        """The image for sandboxes of this node, unpacked now if no one has before.

        Args:
            image: as of `digest`.
            holds: it stays on this node until this is closed.

        Raises:
            ImageError: there is no such image.
            SandboxError: its blob is damaged, or the node has no room for it.
        """
        if image == HOST:
            return UnpackedImage(HOST)
        if image.startswith("/"):
            return UnpackedImage(_checked_directory(image))
        assert self._node is not None, "this store was opened without a node's directory"
        digest, config = self._meant(image)

        def make(directory: Path) -> None:
            blob = self._blob(digest)
            with turn(self._layout.turns, self._slots, PATIENCE_S), storefs.reader(blob) as file:
                unpack(file, directory, digest=digest, max_bytes=2 * MAX_BYTES, max_entries=2 * MAX_ENTRIES)
            storefs.touch(blob)

        held = holds.enter_context(self._node.hold(_hex(digest) + IMAGE, make, needs=config.tar_bytes))
        return UnpackedImage(str(held.path), config.env)

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
        if sharedfs.exists(blob):
            storefs.touch(blob)
        else:
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
        if there is None:
            return
        same = there.digest == record.digest
        config = _own(there, self._config(record.digest)) if same else None
        if config is None or (config.env, config.workdir) != (record.env, record.workdir):
            raise ImageError(
                f"{record.name} is {there.digest} already, and {record.source} is "
                f"{'that with other variables or another directory' if same else record.digest}: "
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
        """The digest of a name, of another way to write one, or of a digest that is in the store."""
        found = self._found(image)
        return found if isinstance(found, str) else found.digest

    def _meant(self, image: str) -> tuple[str, ImageConfig]:
        """The digest, and the configuration that the name has; a digest alone has that of its first import."""
        found = self._found(image)
        if isinstance(found, str):
            return found, self._config(found)
        return found.digest, _own(found, self._config(found.digest))

    def _found(self, image: str) -> ImageName | str:
        """A name's record, or a digest that is in the store."""
        if DIGEST.fullmatch(image):
            if not sharedfs.exists(self._layout.image_blob(_hex(image))):
                raise self._missing(image)
            return image
        for name in store_names(image):
            record = self._record(name) if NAME.fullmatch(name) else None
            if record is not None:
                return record
        raise self._missing(image)

    def _missing(self, image: str) -> ImageError:
        names = [record.name for record, _ in self.names()] if not DIGEST.fullmatch(image) else []
        there = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
        likeliest = store_names(image)[0]
        name = likeliest if likeliest != image else "NAME"
        return ImageError(
            f"no image {image!r} in {self._layout.images}; there is {there or 'none'}: "
            f"rollmill images import {name} SOURCE --store {self._layout.root}",
            boundary="images",
        )

    def _blob(self, digest: str) -> Path:
        blob = self._layout.image_blob(_hex(digest))
        if not sharedfs.exists(blob):
            raise self._missing(digest)
        return blob


def _own(record: ImageName, config: ImageConfig) -> ImageConfig:
    """The configuration of a name: of the files, with the name's own variables and directory."""
    if record.env is None:
        return config
    return msgspec.structs.replace(config, env=record.env, workdir=record.workdir)


def _checked_directory(image: str) -> str:
    if not Path(image).is_dir():
        raise ImageError(f"image {image!r} is no directory on this machine", boundary="images")
    return image


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
