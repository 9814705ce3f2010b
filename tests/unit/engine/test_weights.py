"""A model directory that is not usable is refused in one line that names the directory, the fault and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from stages.engine.errors import EngineError
from stages.engine.weights import load_model_files, read_special_ids
from tests.support.tiny_qwen import tiny_config, write_model


def _edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def _edit_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return edit


def _truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


NORM = "model.layers.1.self_attn.q_norm.weight"

FAULTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no config": (lambda d: (d / "config.json").unlink(), ["config.json", "give a directory"]),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), ["config.json", "JSON"]),  # type: ignore[dict-item]
    "no weights": (lambda d: (d / "model.safetensors").unlink(), ["no weights", "model.safetensors", "save"]),
    "truncated": (_truncate, ["model.safetensors", "again"]),
    "other architecture": (_edit_config(architectures=["LlamaForCausalLM"]), ["LlamaForCausalLM", "Qwen3ForCausalLM"]),
    "other activation": (_edit_config(hidden_act="gelu"), ["hidden_act", "gelu"]),
    "attention bias": (_edit_config(attention_bias=True), ["attention_bias"]),
    "scaled rope": (_edit_config(rope_scaling={"rope_type": "yarn", "factor": 4}), ["yarn", "fleet=vllm"]),
    "key of wrong type": (_edit_config(hidden_size="big"), ["config.json", "hidden_size"]),
    "missing tensor": (_edit_tensors(lambda t: t.pop(NORM)), [NORM, "missing"]),
    "misshapen tensor": (_edit_tensors(lambda t: t.update({NORM: np.ones(3, np.float32)})), [NORM, "(3,)", "(8,)"]),
    "nan": (_edit_tensors(lambda t: t[NORM].fill(np.nan)), [NORM, "finite"]),
    "integers": (_edit_tensors(lambda t: t.update({NORM: np.ones(8, np.int32)})), [NORM, "I32", "float32"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_unusable_directory_is_named(tmp_path: Path, name: str) -> None:
    directory = write_model(tmp_path / "broken-model", tiny_config())
    spoil, words = FAULTS[name]
    spoil(directory)
    with pytest.raises(EngineError) as caught:
        load_model_files(directory)
    message = str(caught.value)
    assert "\n" not in message
    for word in [*words, str(directory)]:
        assert word in message


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no such directory"):
        load_model_files(tmp_path / "nowhere")


def _bfloat16_bytes(values: np.ndarray) -> bytes:
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def test_half_precisions_are_widened(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "half", tiny_config())
    path = directory / "model.safetensors"
    tensors = load_file(path)
    exact = {name: (value * 8).round() / 8 for name, value in tensors.items()}  # representable in both halves
    header: dict[str, object] = {}
    data = b""
    for number, (name, value) in enumerate(exact.items()):
        dtype, raw = ("BF16", _bfloat16_bytes(value)) if number % 2 else ("F16", value.astype(np.float16).tobytes())
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    loaded = load_model_files(directory).tensors
    for name, value in exact.items():
        assert loaded[name].dtype == np.float32
        np.testing.assert_array_equal(loaded[name], value)


def test_eos_ids_of_both_files(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "eos", tiny_config())
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert load_model_files(directory).config.eos_token_ids == {0, 2, 7}


def test_special_ids(model_dir: Path) -> None:
    assert read_special_ids(model_dir) == {0, 1, 2}
