"""Writes a random tiny Qwen3 directory (config, weights, byte-level tokenizer, chat template) for engine tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from stages.engine.weights import ModelConfig, expected_shapes

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins of the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    odd = (byte for byte in range(256) if byte not in plain)
    names = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(odd)}
    return [names[byte] for byte in range(256)]


def _tokenizer() -> dict[str, object]:
    vocab = {token: index for index, token in enumerate([*SPECIAL, *_byte_alphabet()])}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token, **flags} for index, token in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def tiny_config(
    *,
    vocab: int = 259,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    intermediate: int = 48,
    tied: bool = False,
    max_len: int = 512,
    theta: float = 10_000.0,
) -> ModelConfig:
    """A Qwen3 config small enough for thousands of forward passes a test."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope_theta=theta,
        max_position_embeddings=max_len,
        tie_word_embeddings=tied,
        eos_token_ids=frozenset({2}),
    )


def random_tensors(config: ModelConfig, seed: int = 0, scale: float = 0.25) -> dict[str, np.ndarray]:
    """Random weights; norm weights scatter around one, so that folding them wrongly shows."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        values = rng.standard_normal(shape) * (0.3 if len(shape) == 1 else scale) + (1.0 if len(shape) == 1 else 0.0)
        tensors[name] = values.astype(np.float32)
    return tensors


def write_model(directory: Path, config: ModelConfig, seed: int = 0, *, new_style_rope: bool = False) -> Path:
    """Write a complete model directory and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": min(config.eos_token_ids),
    }
    if new_style_rope:
        raw["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    else:
        raw["rope_theta"] = config.rope_theta
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(random_tensors(config, seed), directory / "model.safetensors")
    (directory / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
