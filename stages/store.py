"""The layer store: packed layers by digest on the shared filesystem, unpacked once a node."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from sandbox.layers import unpack
from sandbox.protocols import PackedLayer
from stages import sharedfs
from stages.errors import ShardError
from stages.images import ImageStore
from stages.layout import StoreLayout


class LayerKey(msgspec.Struct, frozen=True):
    """keys/<key>.json: which digest an environment key has; the first committed wins."""

    digest: str
    size_bytes: int


class LayerStore:
    """Layers of one store, with a node-local directory for unpacked ones. All calls block: use them in threads."""

    def __init__(self, layout: StoreLayout, node_dir: Path) -> None:
        self._layout, self._node_dir = layout, node_dir
        self.images = ImageStore(layout, node_dir / ".images")
        """The images of the same store, unpacked beside the layers."""

    def prepare(self) -> None:
        """Make the directories."""
        for directory in self._layout.directories:
            sharedfs.make_dirs(directory)
        self._node_dir.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def warm(self) -> list[str]:
        """Digests that are unpacked on this node."""
        return [f"sha256:{path.name}" for path in self._node_dir.iterdir() if "." not in path.name]

    def find(self, key: str) -> str | None:
        """The digest of an environment key whose layer is in the store."""
        try:
            found = msgspec.json.decode(sharedfs.read_bytes(self._layout.layer_key(key)), type=LayerKey)
        except FileNotFoundError:
            return None
        return found.digest if sharedfs.exists(self._layout.layer_blob(_hex(found.digest))) else None

    def publish(self, key: str, packed: PackedLayer) -> str:
        """Put a packed layer into the store and name it by the key; returns the digest that the key now has."""
        blob = self._layout.layer_blob(_hex(packed.digest))
        if not sharedfs.exists(blob):
            sharedfs.write_atomic(blob, Path(packed.path).read_bytes())
        key_path = self._layout.layer_key(key)
        private = sharedfs.temp_beside(key_path)
        sharedfs.create_exclusive(private, msgspec.json.encode(LayerKey(packed.digest, packed.size_bytes)))
        try:
            won = sharedfs.link(private, key_path)
        finally:
            sharedfs.unlink(private)
        digest: str = packed.digest
        return digest if won else self.find(key) or digest

    def unpacked(self, digest: str) -> Path:
        """The layer as a node-local directory, unpacked now if no one has before.

        Raises:
            ShardError: the store does not hold it.
            SandboxError: the blob is damaged or hostile.
        """
        directory = self._node_dir / _hex(digest)
        if directory.exists():
            return directory
        with self._locked(_hex(digest)):
            if not directory.exists():
                blob = self._layout.layer_blob(_hex(digest))
                if not sharedfs.exists(blob):
                    raise ShardError(f"layer {digest} is not in {self._layout.layer_blobs}", digest=digest)
                with blob.open("rb") as file:
                    unpack(file, directory, digest=digest)
        return directory

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """One process of the node at a time; the lock dies with its holder."""
        fd = os.open(self._node_dir / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
