"""Padding and packing: nothing lost, nothing cut, padding outside every mask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.shards import ShardReader
from stages.shards.packing import bins, chain_arrays, pack, pad, pad_split
from stages.shards.rows import ChainView
from tests.unit.stages_files.samples import make_chain, make_layout, make_row, publish, rows_line, write_rows

LENGTHS = (6, 3, 9, 4)


@pytest.fixture
def chains(tmp_path: Path) -> list[ChainView]:
    layout = make_layout(tmp_path)
    rows = [make_row(n, [make_chain(tokens)]) for n, tokens in enumerate(LENGTHS)]
    publish(layout, [rows_line(n, *one) for n, one in enumerate(zip(rows, write_rows(layout, rows), strict=True), 1)])
    with ShardReader(layout.root) as reader:
        return [row.chains[0] for row in reader]


def test_arrays_are_views_on_the_shard(chains: list[ChainView]) -> None:
    arrays = chain_arrays(chains[0])
    assert {name: array.dtype for name, array in arrays.items()} == {
        "token_ids": np.int32, "loss_mask": np.uint8, "logprobs": np.float32,
    }  # fmt: skip
    assert not any(array.flags.owndata or array.flags.writeable for array in arrays.values())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(chains: list[ChainView], side: str) -> None:
    batch = pad(chains, length=12, pad_id=7, side=side)  # type: ignore[arg-type]
    assert batch["lengths"].tolist() == list(LENGTHS)
    for number, tokens in enumerate(LENGTHS):
        mine = slice(0, tokens) if side == "right" else slice(12 - tokens, 12)
        wanted = make_chain(tokens)
        assert batch["input_ids"][number, mine].tolist() == wanted.token_ids
        assert batch["loss_mask"][number, mine].tolist() == wanted.loss_mask
        assert batch["logprobs"][number, mine].tolist() == wanted.logprobs
        assert batch["position_ids"][number, mine].tolist() == list(range(tokens))
        rest = np.ones(12, bool)
        rest[mine] = False
        assert (batch["input_ids"][number, rest] == 7).all()
        for name in ("attention_mask", "loss_mask", "logprobs", "position_ids"):
            assert not batch[name][number, rest].any()
    with pytest.raises(ValueError, match="a chain of 9 tokens, 8 are allowed"):
        pad(chains, length=8)


def test_prompts_end_and_responses_begin_at_one_column(chains: list[ChainView]) -> None:
    batch = pad_split(chains, prompt_length=4, pad_id=7)
    assert batch["prompts"].tolist() == [[7, 7, 100, 101]] * 4
    assert batch["responses"][1].tolist() == [102, 7, 7, 7, 7, 7, 7]
    assert batch["response_mask"].sum(axis=1).tolist() == [tokens - 2 for tokens in LENGTHS]
    assert batch["attention_mask"].sum(axis=1).tolist() == list(LENGTHS)
    assert batch["position_ids"][1].tolist() == [0, 0, 0, 1, 2] + [0] * 6


def test_packing_keeps_each_chain_whole_with_its_own_positions(chains: list[ChainView]) -> None:
    packed = pack(chains, 10)
    assert sorted(number for batch in packed for number in batch["chains"]) == [0, 1, 2, 3]
    assert len(packed) == 3  # 9, 6 + 4 and 3: 22 tokens need three
    for batch in packed:
        assert len(batch["input_ids"]) == batch["cu_seqlens"][-1] <= 10
        for place, number in enumerate(batch["chains"]):
            mine = slice(batch["cu_seqlens"][place], batch["cu_seqlens"][place + 1])
            wanted = make_chain(LENGTHS[number])
            assert batch["input_ids"][mine].tolist() == wanted.token_ids
            assert batch["loss_mask"][mine].tolist() == wanted.loss_mask
            assert batch["position_ids"][mine].tolist() == list(range(LENGTHS[number]))
    with pytest.raises(ValueError, match="9 tokens, 8 are allowed"):
        pack(chains, 8)


@given(st.lists(st.integers(0, 100), max_size=60))
def test_bins_hold_everything_once_and_are_not_many(lengths: list[int]) -> None:
    found = bins(lengths, 100)
    assert sorted(index for members in found for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in members) <= 100 for members in found)
    assert len(found) <= -(-sum(lengths) // 100) * 2 + 1
