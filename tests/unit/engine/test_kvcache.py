"""Block accounting: ownership, reuse by content, eviction order, and what random use can never break."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.engine.errors import EngineError
from stages.engine.kvcache import BlockPool, KVStore, block_digests


def _names(*values: int) -> list[bytes]:
    return [bytes([value]) for value in values]


def _fill(pool: BlockPool, names: list[bytes]) -> list[int]:
    blocks = pool.allocate(len(names))
    assert blocks is not None
    return [pool.publish(block, name) for block, name in zip(blocks, names, strict=True)]


def test_digests_name_the_whole_beginning() -> None:
    tokens = list(range(40))
    digests = block_digests(tokens, 16, salt="")
    assert len(digests) == 2
    assert block_digests(tokens[:33], 16, salt="") == digests
    changed = block_digests([99, *tokens[1:]], 16, salt="")
    assert changed[0] != digests[0]
    assert changed[1] != digests[1]  # the same 16 tokens behind another beginning
    assert not set(digests) & set(block_digests(tokens, 16, salt="policy-7"))
    assert block_digests([*tokens, *range(8)], 16, salt="", known=digests)[:2] == digests


def test_match_gives_the_longest_known_beginning() -> None:
    pool = BlockPool(8)
    blocks = _fill(pool, _names(1, 2, 3))
    pool.release(blocks)
    assert pool.usage == 0.0
    assert pool.match(_names(1, 2, 9)) == blocks[:2]
    assert pool.match(_names(9, 1)) == []
    assert pool.usage == pytest.approx(2 / 8)


def test_unused_blocks_go_oldest_first_and_tail_before_head() -> None:
    pool = BlockPool(4)
    pool.release(_fill(pool, _names(1, 2)))
    pool.release(_fill(pool, _names(3, 4)))
    assert pool.allocate(1) is not None  # takes 2, the tail of the older
    assert len(pool.match(_names(1))) == 1
    assert pool.match(_names(2)) == []
    assert len(pool.match(_names(3, 4))) == 2


def test_owned_blocks_are_never_taken() -> None:
    pool = BlockPool(3)
    owned = _fill(pool, _names(1, 2))
    assert pool.allocate(2) is None
    assert pool.available == 1
    assert pool.match(_names(1, 2)) == owned


def test_equal_content_is_kept_once() -> None:
    pool = BlockPool(4)
    first = _fill(pool, _names(1))
    second = _fill(pool, _names(1))
    assert first == second
    assert pool.available == 3
    pool.release(first)
    assert pool.available == 3
    pool.release(second)
    assert pool.available == 4


def test_releasing_too_often_is_an_error() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(EngineError, match="released more often"):
        pool.release(blocks)


STEP = st.tuples(st.sampled_from(["take", "match", "drop"]), st.integers(0, 5), st.integers(1, 4))


@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, max_size=60))
def test_random_use_never_loses_or_shares_a_block(steps: list[tuple[str, int, int]]) -> None:
    pool = BlockPool(7)
    held: list[list[int]] = []
    contents: dict[int, bytes] = {}
    for action, which, count in steps:
        chain = [bytes([which, depth]) for depth in range(count)]
        if action == "match":
            found = pool.match(chain)
            assert [contents[block] for block in found] == chain[: len(found)]
            held.append(found)
        elif action == "take":
            fresh = pool.allocate(count)
            if fresh is None:
                assert pool.available < count
                continue
            assert not set(fresh) & {block for blocks in held for block in blocks}
            for block in fresh:
                contents.pop(block, None)
            named = []
            for block, name in zip(fresh, chain, strict=True):
                kept = pool.publish(block, name)
                contents[kept] = name
                named.append(kept)
            held.append(named)
        elif held:
            pool.release(held.pop(which % len(held)))
        owned = {block for blocks in held for block in blocks}
        assert pool.available == 7 - len(owned)


def test_store_gives_back_what_it_took() -> None:
    rows = np.random.default_rng(0).standard_normal((2, 2, 3, 2, 12, 4)).astype(np.float32)
    store = KVStore(rows, blocks=4, block_size=4)
    before = rows.copy()
    store.save(1, 0, 3)
    store.save(1, 4, 0)
    store.load(2, [3, 0])
    np.testing.assert_array_equal(rows[:, :, 2, :, :8], before[:, :, 1, :, :8])
    np.testing.assert_array_equal(rows[:, :, 2, :, 8:], before[:, :, 2, :, 8:])
    store.move(1, 0, 10)
    np.testing.assert_array_equal(rows[:, :, 0, :, :10], before[:, :, 1, :, :10])
