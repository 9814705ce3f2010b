"""The forward pass against a plain float64 reference, in one pass, in chunks, and decoded in ragged batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stages.engine.qwen3 import Qwen3
from stages.engine.weights import ModelConfig, ModelFiles, load_model_files
from tests.support.tiny_qwen import random_tensors, tiny_config, write_model
from tests.unit.engine.reference import reference_logits

CONFIGS = {
    "untied": tiny_config(),
    "tied": tiny_config(tied=True),
    "no groups": tiny_config(heads=4, kv_heads=4),
    "one kv head": tiny_config(heads=6, kv_heads=1, head_dim=4),
    "head_dim apart from hidden": tiny_config(hidden=24, heads=4, head_dim=16, theta=1e6),
}


def _ids(count: int, seed: int = 0) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(0, 259, count)]


@pytest.mark.parametrize("name", CONFIGS)
def test_matches_reference(name: str) -> None:
    config = CONFIGS[name]
    tensors = random_tensors(config, seed=3)
    ids = _ids(70)
    expected = reference_logits(config, tensors, ids)
    found = Qwen3(ModelFiles(config, tensors)).logits(ids)
    assert np.abs(expected).max() > 1.0
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_chunked_prefill_and_decode_match_one_pass(model: Qwen3) -> None:
    ids = _ids(61)
    whole = model.logits(ids)
    rows = model.new_rows(3, 64)
    for start, end in ((0, 1), (1, 24), (24, 40)):
        last = model.prefill(np.array(ids[start:end]), start, rows, 2)
        np.testing.assert_allclose(last[0], whole[end - 1], atol=5e-5)
    for position in range(40, 61):
        step = model.decode(np.array(ids[position : position + 1]), np.array([position]), rows, slice(2, 3))
        np.testing.assert_allclose(step[0], whole[position], atol=5e-5)


@pytest.mark.parametrize(
    "which", [slice(1, 5), np.array([1, 2, 3, 4]), np.array([4, 0, 2, 5])], ids=["slice", "dense", "holes"]
)
def test_ragged_batch_decodes_each_row_as_alone(model: Qwen3, which: slice | np.ndarray) -> None:
    lengths = [5, 33, 17, 48]
    rows = model.new_rows(6, 64)
    rows[...] = 7.0  # what an earlier sequence left behind must not shine through
    index = np.arange(6)[which]
    sequences = [_ids(length + 1, seed=length) for length in lengths]
    for row, ids in zip(index, sequences, strict=True):
        model.prefill(np.array(ids[:-1]), 0, rows, int(row))
    logits = model.decode(np.array([ids[-1] for ids in sequences]), np.array(lengths), rows, which)
    for found, ids in zip(logits, sequences, strict=True):
        np.testing.assert_allclose(found, model.logits(ids)[-1], atol=5e-5)


@pytest.mark.parametrize("new_style", [False, True], ids=["rope_theta", "rope_parameters"])
def test_both_spellings_of_the_rotary_base(tmp_path: Path, new_style: bool) -> None:
    config = tiny_config(theta=123_456.0)
    files = load_model_files(write_model(tmp_path, config, new_style_rope=new_style))
    assert files.config == config


def test_large_gates_do_not_overflow(model: Qwen3) -> None:
    config: ModelConfig = tiny_config()
    tensors = random_tensors(config)
    tensors["model.layers.0.mlp.gate_proj.weight"] *= 1000
    ids = _ids(20)
    with np.errstate(all="raise", under="ignore"):
        found = Qwen3(ModelFiles(config, tensors)).logits(ids)
    np.testing.assert_allclose(found, reference_logits(config, tensors, ids), atol=2e-3)
