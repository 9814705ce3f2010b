"""Qwen3 written down plainly in float64, without cache or folding: what the engine's arithmetic is held to."""

from __future__ import annotations

import numpy as np

from stages.engine.weights import ModelConfig


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def _rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding of (tokens, heads, dim) as transformers writes it: cos x + sin rotate_half(x)."""
    tokens, _, dim = x.shape
    frequency = 1.0 / theta ** (np.arange(0, dim, 2) / dim)
    angle = np.concatenate([np.outer(np.arange(tokens), frequency)] * 2, axis=1)[:, None, :]
    half = np.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], axis=-1)
    return x * np.cos(angle) + half * np.sin(angle)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def reference_logits(config: ModelConfig, tensors: dict[str, np.ndarray], token_ids: list[int]) -> np.ndarray:
    """Logits (tokens, vocab) of a sequence."""
    weights = {name: value.astype(np.float64) for name, value in tensors.items()}
    eps, dim, count = config.rms_norm_eps, config.head_dim, len(token_ids)
    group = config.num_attention_heads // config.num_key_value_heads
    x = weights["model.embed_tokens.weight"][token_ids]
    for index in range(config.num_hidden_layers):
        w = {n.split(f"layers.{index}.")[1]: v for n, v in weights.items() if f"layers.{index}." in n}
        h = _norm(x, w["input_layernorm.weight"], eps)
        q = (h @ w["self_attn.q_proj.weight"].T).reshape(count, -1, dim)
        k = (h @ w["self_attn.k_proj.weight"].T).reshape(count, -1, dim)
        v = (h @ w["self_attn.v_proj.weight"].T).reshape(count, -1, dim)
        q = _rotate(_norm(q, w["self_attn.q_norm.weight"], eps), config.rope_theta)
        k = _rotate(_norm(k, w["self_attn.k_norm.weight"], eps), config.rope_theta)
        heads = []
        for head in range(config.num_attention_heads):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(dim)
            scores[np.triu_indices(count, 1)] = -np.inf
            heads.append(_softmax(scores) @ v[:, head // group])
        x = x + np.concatenate(heads, axis=1) @ w["self_attn.o_proj.weight"].T
        h = _norm(x, w["post_attention_layernorm.weight"], eps)
        gate, up = h @ w["mlp.gate_proj.weight"].T, h @ w["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-np.maximum(gate, -700))) * up) @ w["mlp.down_proj.weight"].T
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return _norm(x, weights["model.norm.weight"], eps) @ head.T
