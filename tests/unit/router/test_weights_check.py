"""Directories of weights: what is wrong with one is said before any engine hears of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.engine_control import WeightsError, check_weights


def saved(directory: Path, config: Any, header: Any, index: Any = None) -> Path:
    """A directory with these files; the tensors are as long as a header of one entry of four bytes says."""
    (directory / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    if index is not None:
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def header(name: str = "lm_head.weight") -> dict[str, Any]:
    return {"__metadata__": {"format": "pt"}, name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}


@pytest.mark.parametrize(
    ("head", "index"),
    [
        ({"a": [1]}, None),
        ({"a": {"dtype": "F32"}}, None),
        ({"a": {"data_offsets": [4]}}, None),
        ({"a": {"data_offsets": ["0", "4"]}}, None),
        ({}, None),
        (header(), []),
        (header(), {"weight_map": ["model.safetensors"]}),
        (header(), {"weight_map": {"a": 1}}),
        (header(), {"weight_map": {"a": "../model.safetensors"}}),
        (header(), {"weight_map": {"a": ".."}}),
        (header(), {"weight_map": {"a": "none.safetensors"}}),
    ],
)
def test_a_directory_of_another_shape_is_refused_by_name(tmp_path: Path, head: Any, index: Any) -> None:
    with pytest.raises(WeightsError, match="safetensors"):
        check_weights(saved(tmp_path, {}, head, index))


@pytest.mark.parametrize("config", [[], {"tie_word_embeddings": "yes"}, {"text_config": 3}])
def test_a_config_of_another_shape_is_refused(tmp_path: Path, config: Any) -> None:
    with pytest.raises(WeightsError, match=r"config\.json"):
        check_weights(saved(tmp_path, config, header()))


@pytest.mark.parametrize(
    ("config", "name", "tied"),
    [
        ({"tie_word_embeddings": True}, "lm_head.weight", True),
        ({"text_config": {"tie_word_embeddings": True}}, "lm_head.weight", True),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, "lm_head.weight", False),
        ({"tie_word_embeddings": False}, "model.embed_tokens.weight", False),
        ({}, "model.language_model.lm_head.weight", False),
        ({}, "model.embed_tokens.weight", True),
    ],
)
def test_tied_embeddings_are_refused_where_a_reload_would_corrupt_them(
    tmp_path: Path, config: Any, name: str, tied: bool
) -> None:
    directory = saved(tmp_path, config, header(name), {"weight_map": {name: "model.safetensors"}})
    check_weights(directory)
    if not tied:
        check_weights(directory, allow_tied=False)
        return
    with pytest.raises(WeightsError, match="tie"):
        check_weights(directory, allow_tied=False)
