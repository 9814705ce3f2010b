"""Reads a Hugging Face directory: the config of a Qwen3 and its tensors as float32 arrays, or one clear refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from stages.engine.errors import EngineError

F32 = npt.NDArray[np.float32]

_ARCHITECTURE = "Qwen3ForCausalLM"

# The library's types leave its function untyped.
_parse_tensors: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = deserialize


class ModelConfig(msgspec.Struct, frozen=True):
    """The numbers of a Qwen3 that its forward pass needs (names as in Hugging Face's config.json)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]

    @property
    def kv_floats_per_token(self) -> int:
        """Floats of keys and values that one token leaves in the cache, over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


class ModelFiles(msgspec.Struct, frozen=True):
    """A checked model: its config and its tensors under their Hugging Face names."""

    config: ModelConfig
    tensors: dict[str, F32]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise EngineError(
            f"model directory {path.parent}: cannot read {path.name} ({error.strerror}); "
            f"give a directory with config.json, model.safetensors and tokenizer.json"
        ) from error
    except msgspec.DecodeError as error:
        raise EngineError(f"model directory {path.parent}: {path.name} is not a JSON object ({error})") from error


def _eos_ids(directory: Path, config: dict[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    generation = directory / "generation_config.json"
    for source in (config, _read_json(generation) if generation.is_file() else {}):
        value = source.get("eos_token_id")
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)


def _refuse_unknown_arithmetic(directory: Path, raw: dict[str, Any], rope: dict[str, Any]) -> None:
    """Refuse what the forward pass would silently compute otherwise than the model was trained."""
    differing = {
        "architectures": (raw.get("architectures"), [_ARCHITECTURE]),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(raw.get("attention_bias", False)), False),
        "use_sliding_window": (bool(raw.get("use_sliding_window", False)), False),
        "rope type": (rope.get("rope_type", rope.get("type", "default")), "default"),
    }
    for key, (found, wanted) in differing.items():
        if found != wanted:
            raise EngineError(
                f"model directory {directory}: config.json has {key}={found!r}, the embedded engine computes only "
                f"{wanted!r}; serve this model with fleet=vllm"
            )


def read_config(directory: Path) -> ModelConfig:
    """Read config.json (and generation_config.json for the end-of-sequence ids).

    Both spellings of the rotary base are known: `rope_theta` and, from transformers 5 on, `rope_parameters`.

    Raises:
        EngineError: no such directory or file, another architecture, or a key that is missing or of the wrong type.
    """
    if not directory.is_dir():
        raise EngineError(f"model directory {directory}: no such directory; give the path of a Hugging Face checkpoint")
    raw = _read_json(directory / "config.json")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    _refuse_unknown_arithmetic(directory, raw, rope)
    known = {
        **raw,
        "head_dim": raw.get("head_dim") or raw.get("hidden_size", 0) // max(1, raw.get("num_attention_heads", 1)),
        "rope_theta": raw.get("rope_theta") or rope.get("rope_theta", 10_000.0),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "eos_token_ids": list(_eos_ids(directory, raw)),
    }
    try:
        return msgspec.convert(known, ModelConfig)
    except msgspec.ValidationError as error:
        raise EngineError(f"model directory {directory}: config.json is not usable: {error}") from error


def read_special_ids(directory: Path) -> frozenset[int]:
    """Ids of the added tokens that tokenizer.json marks as special: they never show in the text of an answer.

    Raises:
        EngineError: tokenizer.json is missing or no JSON object.
    """
    added = _read_json(directory / "tokenizer.json").get("added_tokens", [])
    return frozenset(entry["id"] for entry in added if entry.get("special"))


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config must hold, with its shape (rows are outputs)."""
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "self_attn.q_norm.weight": (head,),
            prefix + "self_attn.k_norm.weight": (head,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (config.intermediate_size, hidden),
            prefix + "mlp.up_proj.weight": (config.intermediate_size, hidden),
            prefix + "mlp.down_proj.weight": (hidden, config.intermediate_size),
        }
    return shapes


def _to_float32(path: Path, name: str, dtype: str, shape: list[int], data: bytes) -> F32:
    if dtype == "F32":
        flat = np.frombuffer(data, dtype="<f4").astype(np.float32)
    elif dtype == "F16":
        flat = np.frombuffer(data, dtype="<f2").astype(np.float32)
    elif dtype == "BF16":
        # numpy has no bfloat16: it is the upper half of a float32.
        flat = (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        raise EngineError(
            f"{path}: tensor {name} has dtype {dtype}; save the checkpoint as float32, float16 or bfloat16"
        )
    return flat.reshape(shape)


def read_tensors(directory: Path, config: ModelConfig) -> dict[str, F32]:
    """Read model.safetensors as float32 and check that each expected tensor is there with its shape.

    Raises:
        EngineError: the file is missing or damaged, or a tensor is missing, misshapen, of an unknown dtype or not
            finite.
    """
    path = directory / "model.safetensors"
    try:
        stored = dict(_parse_tensors(path.read_bytes()))
    except OSError as error:
        raise EngineError(
            f"model directory {directory}: no weights, cannot read model.safetensors ({error.strerror}); "
            f"save the checkpoint there as one safetensors file"
        ) from error
    except SafetensorError as error:
        raise EngineError(
            f"{path}: not a usable safetensors file ({error}); copy or save the checkpoint again"
        ) from error
    tensors: dict[str, F32] = {}
    for name, shape in expected_shapes(config).items():
        if name not in stored:
            raise EngineError(
                f"{path}: tensor {name} is missing; the file and config.json are not of one {_ARCHITECTURE}"
            )
        entry = stored[name]
        if tuple(entry["shape"]) != shape:
            raise EngineError(f"{path}: tensor {name} has shape {tuple(entry['shape'])}, config.json asks for {shape}")
        tensors[name] = _to_float32(path, name, entry["dtype"], entry["shape"], entry["data"])
        if not np.isfinite(tensors[name]).all():
            raise EngineError(f"{path}: tensor {name} holds values that are not finite; the checkpoint is damaged")
    return tensors


def load_model_files(directory: Path) -> ModelFiles:
    """Read and check a whole model directory.

    Raises:
        EngineError: names the directory, what is missing or wrong in it, and what to do.
    """
    config = read_config(directory)
    return ModelFiles(config=config, tensors=read_tensors(directory, config))
