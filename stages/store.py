"""The layer store: packed layers by digest on the shared filesystem, unpacked once a node."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from sandbox.flatten import squash
from sandbox.layers import unpack
from sandbox.mountplan import MAX_LAYERS
from sandbox.nodecache import NodeCache
from sandbox.protocols import PackedLayer
from stages import sharedfs, storefs
from stages.errors import ShardError
from stages.imagerecords import UnpackedImage
from stages.images import PATIENCE_S, ImageStore
from stages.layout import StoreLayout
from stages.pacing import turn
from stages.pruning import register

SQUASHED = ".squashed"
"""What the name of several layers merged into one ends with on a node."""

WARM_MOST = 64
"""Digests that a request for leases names at most."""


class LayerKey(msgspec.Struct, frozen=True):
    """keys/<key>.json: which digest an environment key has; the first committed wins."""

    digest: str
    size_bytes: int


class Standing(msgspec.Struct, frozen=True):
    """What a sandbox stands on, unpacked on this node: the image, and layers over it, lowest first."""

    image: UnpackedImage
    layers: tuple[Path, ...]


class _Taken:
    """A standing that is taken, or being taken, and how many sandboxes of this process stand on it."""

    def __init__(self, taking: asyncio.Future[Standing], holds: ExitStack) -> None:
        self.taking, self.holds, self.users = taking, holds, 0

    def let_go(self, _: asyncio.Future[Standing]) -> None:
        self.holds.close()
        if not self.taking.cancelled():
            self.taking.exception()  # told already, or nobody waits for it any more


class LayerStore:
    """Layers of one store, with a node-local directory for unpacked ones. All calls but `standing` block.

    Args:
        layout: the store.
        node_dir: on this node's own disk.
        quota_bytes: what everything unpacked on this node may take; None: half of the disk.
        slots: nodes that unpack from this store at once.
    """

    def __init__(self, layout: StoreLayout, node_dir: Path, *, quota_bytes: int | None = None, slots: int = 8) -> None:
        self._layout, self._slots = layout, slots
        self._node = NodeCache(node_dir, quota_bytes)
        self._lately: dict[str, None] = {}
        self._taken: dict[tuple[str, tuple[str, ...], int], _Taken] = {}
        self._noting = threading.Lock()
        self.images = ImageStore(layout, self._node, slots=slots)
        """The images of the same store, unpacked beside the layers."""

    def prepare(self, run_dir: Path) -> None:
        """Make the directories, and say which run uses the store now."""
        for directory in self._layout.directories:
            sharedfs.make_dirs(directory)
        register(self._layout, run_dir)
        self._node.prepare()

    @property
    def warm(self) -> list[str]:
        """Digests that this process has stood on last, and that are likely unpacked on this node therefore.

        All that the node holds would be a directory of thousands, listed and sent with every request for leases.
        """
        with self._noting:
            return list(self._lately)

    def find(self, key: str) -> str | None:
        """The digest of an environment key whose layer is in the store."""
        try:
            found = msgspec.json.decode(sharedfs.read_bytes(self._layout.layer_key(key)), type=LayerKey)
        except FileNotFoundError:
            return None
        blob = self._layout.layer_blob(_hex(found.digest))
        if not sharedfs.exists(blob):
            return None
        storefs.touch(blob)  # the run that asks has begun to use it
        return found.digest

    def publish(self, key: str, packed: PackedLayer) -> str:
        """Put a packed layer into the store and name it by the key; returns the digest that the key now has."""
        blob = self._layout.layer_blob(_hex(packed.digest))
        if not sharedfs.exists(blob):
            sharedfs.write_atomic(blob, Path(packed.path).read_bytes())
        else:
            storefs.touch(blob)
        key_path = self._layout.layer_key(key)
        private = sharedfs.temp_beside(key_path)
        sharedfs.create_exclusive(private, msgspec.json.encode(LayerKey(packed.digest, packed.size_bytes)))
        try:
            won = sharedfs.link(private, key_path)
            there = packed.digest if won else self.find(key)
            if there is None:  # the key's layer was pruned
                sharedfs.publish(private, key_path)
        finally:
            sharedfs.unlink(private)
        return there or packed.digest

    @asynccontextmanager
    async def standing(self, image: str, digests: Sequence[str] = (), *, room: int = 0) -> AsyncIterator[Standing]:
        """Image and layers unpacked on this node, and kept there while the block runs.

        What another block of this process stands on just now is shared with it: a group's rollouts look once.

        Args:
            image: as of `ImageStore.digest`.
            digests: of layers, lowest first; where they are more than a sandbox takes, the lowest are merged into one.
            room: layers that the caller adds on top.

        Raises:
            ShardError: the store does not hold a layer.
            SandboxError: there is no such image, a blob is damaged or hostile, or the node has no room.
        """
        key = image, tuple(digests), room
        taken = self._taken.get(key)
        if taken is None:
            holds = ExitStack()
            taking = asyncio.ensure_future(asyncio.to_thread(self._stand, holds, *key))
            taken = self._taken[key] = _Taken(taking, holds)
        taken.users += 1
        try:
            found = await asyncio.shield(taken.taking)
            for digest in digests:
                self._note(digest)
            yield found
        except BaseException:  # whoever comes next looks anew; raised again
            self._forget(key, taken)
            raise
        finally:  # a thread that still unpacks for one that was cancelled is not stopped: others will want it
            taken.users -= 1
            if taken.users == 0:
                self._forget(key, taken)
                taken.taking.add_done_callback(taken.let_go)

    def _forget(self, key: tuple[str, tuple[str, ...], int], taken: _Taken) -> None:
        if self._taken.get(key) is taken:
            del self._taken[key]

    def _stand(self, holds: ExitStack, image: str, digests: tuple[str, ...], room: int) -> Standing:
        found = self.images.take(image, holds)
        most = MAX_LAYERS - room
        if len(digests) <= most:
            return Standing(found, tuple(self.take(digest, holds) for digest in digests))
        lowest, rest = digests[: len(digests) - most + 1], digests[len(digests) - most + 1 :]
        return Standing(found, (self._squashed(lowest, holds), *(self.take(digest, holds) for digest in rest)))

    def take(self, digest: str, holds: ExitStack) -> Path:
        """The layer as a node-local directory, unpacked now if no one has before; it stays until `holds` is closed.

        Raises:
            ShardError: the store does not hold it.
            SandboxError: the blob is damaged or hostile, or the node has no room.
        """

        def make(directory: Path) -> None:
            blob = self._layout.layer_blob(_hex(digest))
            if not sharedfs.exists(blob):
                raise ShardError(f"layer {digest} is not in {self._layout.layer_blobs}", digest=digest)
            with turn(self._layout.turns, self._slots, PATIENCE_S), storefs.reader(blob) as file:
                unpack(file, directory, digest=digest)
            storefs.touch(blob)

        there = holds.enter_context(self._node.hold(_hex(digest), make)).path
        self._note(digest)
        return there

    def _note(self, digest: str) -> None:
        with self._noting:
            self._lately.pop(digest, None)
            self._lately[digest] = None
            if len(self._lately) > WARM_MOST:
                del self._lately[next(iter(self._lately))]

    def _squashed(self, digests: tuple[str, ...], holds: ExitStack) -> Path:
        """Several layers as one."""
        name = hashlib.sha256("\n".join(digests).encode()).hexdigest() + SQUASHED

        def make(directory: Path) -> None:
            with ExitStack() as meanwhile:
                squash([self.take(digest, meanwhile) for digest in digests], directory)

        return holds.enter_context(self._node.hold(name, make)).path


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
