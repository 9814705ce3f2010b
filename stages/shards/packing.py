"""Chains as NumPy arrays for a trainer: padded to one length, split into prompt and response, or packed.

NumPy is looked up when a function is called: reading shards needs pyarrow alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from stages.shards.rows import ChainView

_COLUMNS = ("token_ids", "loss_mask", "logprobs")
Arrays = dict[str, Any]
"""Name to numpy.ndarray."""


def _numpy() -> Any:
    return importlib.import_module("numpy")


def chain_arrays(chain: ChainView) -> Arrays:
    """Views on the shard, without copying: token_ids int32, loss_mask uint8, logprobs float32, each of shape [n]."""
    return {name: chain.array(name).to_numpy() for name in _COLUMNS}


def _fill(rows: Sequence[Any], width: int, value: float, dtype: Any, side: Literal["left", "right"]) -> Any:
    filled = _numpy().full((len(rows), width), value, dtype)
    for target, row in zip(filled, rows, strict=True):
        if side == "right":
            target[: len(row)] = row
        else:
            target[width - len(row) :] = row
    return filled


def _width(longest: int, limit: int | None, what: str) -> int:
    if limit is None:
        return longest
    if longest > limit:
        raise ValueError(
            f"{what} of {longest} tokens, {limit} are allowed: filter by length before, nothing is cut here"
        )
    return limit


def pad(
    chains: Sequence[ChainView], *, length: int | None = None, pad_id: int = 0, side: Literal["left", "right"] = "right"
) -> Arrays:
    """A batch of whole streams.

    Returns:
        `input_ids` int32, `attention_mask` uint8 (0 on padding), `loss_mask` uint8, `logprobs` float32 (0.0 where the
        mask is 0), `position_ids` int32 (0 on padding), all [chains, length]; `lengths` int32 [chains].

    Raises:
        ValueError: a chain is longer than `length`.
    """
    np = _numpy()
    arrays = [chain_arrays(chain) for chain in chains]
    lengths = np.array([len(one["token_ids"]) for one in arrays], np.int32)
    width = _width(int(lengths.max(initial=0)), length, "a chain")
    ones = [np.ones(size, np.uint8) for size in lengths]
    return {
        "input_ids": _fill([one["token_ids"] for one in arrays], width, pad_id, np.int32, side),
        "attention_mask": _fill(ones, width, 0, np.uint8, side),
        "loss_mask": _fill([one["loss_mask"] for one in arrays], width, 0, np.uint8, side),
        "logprobs": _fill([one["logprobs"] for one in arrays], width, 0.0, np.float32, side),
        "position_ids": _fill([np.arange(size, dtype=np.int32) for size in lengths], width, 0, np.int32, side),
        "lengths": lengths,
    }


def pad_split(
    chains: Sequence[ChainView],
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    pad_id: int = 0,
) -> Arrays:
    """A batch of prompts, padded on the left, and responses, padded on the right, so that all responses begin together.

    Returns:
        `prompts` int32 [chains, p], `responses` int32, `response_mask` uint8, `logprobs` float32 [chains, r];
        `input_ids` int32, `attention_mask` uint8, `position_ids` int32 (0 on padding) [chains, p + r].

    Raises:
        ValueError: a prompt or a response is longer than allowed.
    """
    np = _numpy()
    arrays = [chain_arrays(chain) for chain in chains]
    cuts = [int(chain["prompt_length"]) for chain in chains]
    prompts = [one["token_ids"][:cut] for one, cut in zip(arrays, cuts, strict=True)]
    tails = {name: [one[name][cut:] for one, cut in zip(arrays, cuts, strict=True)] for name in _COLUMNS}
    left = _width(max(cuts, default=0), prompt_length, "a prompt")
    right = _width(max(map(len, tails["token_ids"]), default=0), response_length, "a response")
    attention = np.concatenate(
        [
            _fill([np.ones(len(row), np.uint8) for row in prompts], left, 0, np.uint8, "left"),
            _fill([np.ones(len(row), np.uint8) for row in tails["token_ids"]], right, 0, np.uint8, "right"),
        ],
        axis=1,
    )
    out = {
        "prompts": _fill(prompts, left, pad_id, np.int32, "left"),
        "responses": _fill(tails["token_ids"], right, pad_id, np.int32, "right"),
        "response_mask": _fill(tails["loss_mask"], right, 0, np.uint8, "right"),
        "logprobs": _fill(tails["logprobs"], right, 0.0, np.float32, "right"),
    }
    positions = np.maximum(np.cumsum(attention, axis=1, dtype=np.int32) - 1, 0) * attention
    return out | {
        "input_ids": np.concatenate([out["prompts"], out["responses"]], axis=1),
        "attention_mask": attention,
        "position_ids": positions.astype(np.int32),
    }


def bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `capacity`: first fit, the longest first (at most 11/9 of the best + 1).

    Raises:
        ValueError: one is longer than `capacity`.
    """
    _width(max(lengths, default=0), capacity, "a chain")
    filled: list[tuple[int, list[int]]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        for place, (used, members) in enumerate(filled):
            if used + lengths[index] <= capacity:
                filled[place] = (used + lengths[index], [*members, index])
                break
        else:
            filled.append((lengths[index], [index]))
    return [sorted(members) for _, members in filled]


def pack(chains: Sequence[ChainView], capacity: int) -> list[Mapping[str, Any]]:
    """Batches of one row each, chains one after the other without padding, as variable-length attention takes them.

    Returns:
        For each bin `input_ids` int32, `loss_mask` uint8, `logprobs` float32, `position_ids` int32 (from 0 in each
        chain), all [tokens]; `cu_seqlens` int32 [chains + 1], the chains' bounds; `chains`, their indices.

    Raises:
        ValueError: a chain is longer than `capacity`.
    """
    np = _numpy()
    arrays = [chain_arrays(chain) for chain in chains]
    lengths = [len(one["token_ids"]) for one in arrays]
    packed: list[Mapping[str, Any]] = []
    for members in bins(lengths, capacity):
        sizes = [lengths[index] for index in members]
        names = {"input_ids": "token_ids", "loss_mask": "loss_mask", "logprobs": "logprobs"}
        packed.append(
            {name: np.concatenate([arrays[index][column] for index in members]) for name, column in names.items()}
            | {
                "position_ids": np.concatenate([np.arange(size, dtype=np.int32) for size in sizes]),
                "cu_seqlens": np.cumsum([0, *sizes], dtype=np.int32),
                "chains": members,
            }
        )
    return packed
