"""Keys and values: block accounting with a prefix cache (BlockPool) and the arrays behind it (KVStore).

A running sequence's keys and values lie contiguous in its row of `KVStore.rows`, so that a decode step reads them in
place instead of gathering blocks. Blocks are the unit of capacity and of reuse: each sequence owns as many as its
tokens need, and when one fills, its content is copied into the block store, from where a later sequence with the same
beginning copies it back.

A full block is named by a digest of its tokens and of its predecessor's digest (vLLM's hash chain), so equal names
mean equal beginnings. Unused named blocks stay until their room is needed, least recently used first and a sequence's
tail before its head.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from stages.engine.errors import EngineError
from stages.engine.weights import F32

_DIGEST_BYTES = 16


def block_digests(token_ids: Sequence[int], block_size: int, *, salt: str, known: Sequence[bytes] = ()) -> list[bytes]:
    """Digests of all full blocks of a token sequence.

    Args:
        token_ids: the sequence from its beginning.
        block_size: tokens in a block.
        salt: sequences of different salts share nothing.
        known: digests of the first blocks, computed before; they are not computed again.
    """
    digests = list(known)
    previous = digests[-1] if digests else hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()
    for start in range(len(digests) * block_size, len(token_ids) - block_size + 1, block_size):
        content = array("q", token_ids[start : start + block_size]).tobytes()
        previous = hashlib.blake2b(previous + content, digest_size=_DIGEST_BYTES).digest()
        digests.append(previous)
    return digests


class BlockPool:
    """Which block is owned, by how many, and which content the unowned ones still hold; no arrays.

    Args:
        count: number of blocks.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._owners = [0] * count
        self._names: list[bytes | None] = [None] * count
        self._by_name: dict[bytes, int] = {}
        self._blank = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that an allocation could have now."""
        return len(self._blank) + len(self._idle)

    @property
    def usage(self) -> float:
        """Owned blocks as a fraction of all."""
        return 1.0 - self.available / self.count

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Take ownership of the longest known beginning of a digest chain; gives its blocks in order."""
        found: list[int] = []
        for digest in digests:
            block = self._by_name.get(digest)
            if block is None:
                break
            self._own(block)
            found.append(block)
        return found

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, forgetting the longest unused where none is blank; None when too few are left."""
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._forget(block)
            self._owners[block] = 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, digest: bytes) -> int:
        """Name an owned block that has been filled.

        Returns:
            The block that now stands for this content. It is another one when the content is there already: that one
            is owned instead, and the given one is free again.
        """
        same = self._by_name.get(digest)
        if same is None:
            self._names[block] = digest
            self._by_name[digest] = block
            return block
        if same != block:
            self._own(same)
            self.release([block])
        return same

    def release(self, blocks: Sequence[int]) -> None:
        """Give up a sequence's blocks (in its order); named ones stay known until their room is needed."""
        for block in reversed(blocks):
            self._owners[block] -= 1
            if self._owners[block] < 0:
                raise EngineError(f"block {block} was released more often than taken: the cache's accounting is broken")
            if self._owners[block]:
                continue
            if self._names[block] is None:
                self._blank.append(block)
            else:
                self._idle[block] = None

    def forget_all(self) -> None:
        """Forget the content of every block that nobody owns."""
        while self._idle:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            self._blank.append(block)

    def _own(self, block: int) -> None:
        self._owners[block] += 1
        self._idle.pop(block, None)

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._by_name[name]
            self._names[block] = None


class KVStore:
    """The arrays: rows of running sequences and the contents of blocks.

    Args:
        rows: zeroed (layers, 2, rows, kv_heads, max_len, head_dim), see the model's `new_rows`.
        blocks: number of blocks.
        block_size: tokens in a block.
    """

    def __init__(self, rows: F32, blocks: int, block_size: int) -> None:
        layers, two, _, heads, _, head_dim = rows.shape
        self.rows = rows
        self.block_size = block_size
        self._blocks: F32 = np.zeros((blocks, layers, two, heads, block_size, head_dim), dtype=np.float32)

    def save(self, row: int, start: int, block: int) -> None:
        """Copy the full block of tokens from `start` of a row into the block store."""
        self._blocks[block] = self.rows[:, :, row, :, start : start + self.block_size]

    def load(self, row: int, blocks: Sequence[int]) -> None:
        """Copy blocks to the beginning of a row."""
        if blocks:
            found = self._blocks[np.asarray(blocks)].transpose(1, 2, 3, 0, 4, 5)
            layers, two, heads, count, size, head_dim = found.shape
            self.rows[:, :, row, :, : count * size] = found.reshape(layers, two, heads, count * size, head_dim)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one row to another."""
        self.rows[:, :, target, :, :length] = self.rows[:, :, source, :, :length]
