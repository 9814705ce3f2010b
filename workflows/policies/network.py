"""Qwen3 in torch, small: the forward pass for training and a cached one-token step for sampling."""

# mypy: disallow-subclassing-any=False
# torch is not installed where the house is checked, so its classes are Any there.
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
}
"""Hugging Face's names: the file that the engines read is this one with the eos id added."""

HEADS, KV_HEADS, HEAD_DIM = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [batch, kv heads, positions, head dim]."""


class Attention(nn.Module):
    """Grouped-query attention with RMS-normed queries and keys, and rotary positions in the half-split layout."""

    def __init__(self) -> None:
        super().__init__()
        hidden, eps = CONFIG["hidden_size"], CONFIG["rms_norm_eps"]
        self.q_proj = nn.Linear(hidden, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(hidden, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(hidden, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, hidden, bias=False)
        self.q_norm = nn.RMSNorm(HEAD_DIM, eps)
        self.k_norm = nn.RMSNorm(HEAD_DIM, eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None, at: int) -> Tensor:
        """Attend over `x` [batch, length, hidden]; with `past`, x is the one position `at` and the cache is filled."""
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, HEADS, HEAD_DIM)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, KV_HEADS, HEAD_DIM)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k = _rotate(q, rope), _rotate(k, rope)
        if past is not None:
            past[0][:, :, at : at + 1], past[1][:, :, at : at + 1] = k, v
            k, v = past[0][:, :, : at + 1], past[1][:, :, : at + 1]
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, HEADS * HEAD_DIM))
        return mixed


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to the last axis."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        hidden, eps = CONFIG["hidden_size"], CONFIG["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = Mlp()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None, at: int) -> Tensor:
        """See `Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), rope, past, at)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Backbone(nn.Module):
    """Embedding, layers and the last norm: what Hugging Face's files call `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], CONFIG["hidden_size"])
        self.layers = nn.ModuleList(Layer() for _ in range(CONFIG["num_hidden_layers"]))
        self.norm = nn.RMSNorm(CONFIG["hidden_size"], CONFIG["rms_norm_eps"])


class Qwen3(nn.Module):
    """The whole model; the names of its parameters are those of Hugging Face's files."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Backbone()
        self.lm_head = nn.Linear(CONFIG["hidden_size"], CONFIG["vocab_size"], bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=CONFIG["initializer_range"])

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states [batch, length, hidden] of `ids` [batch, length], each position seeing those before it."""
        return self._run(ids, _rope(torch.arange(ids.shape[1])), None, 0)

    def step(self, ids: Tensor, cache: Cache, at: int) -> Tensor:
        """Logits [batch, vocab] after the tokens `ids` [batch] at position `at`; fills the cache there."""
        hidden = self._run(ids[:, None], _rope(torch.tensor([at])), cache, at)
        logits: Tensor = self.lm_head(hidden[:, 0])
        return logits

    def _run(self, ids: Tensor, rope: tuple[Tensor, Tensor], cache: Cache | None, at: int) -> Tensor:
        x: Tensor = self.model.embed_tokens(ids)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, rope, cache[index] if cache is not None else None, at)
        normed: Tensor = self.model.norm(x)
        return normed


def new_cache(batch: int, positions: int) -> Cache:
    """An empty cache for `batch` streams of up to `positions` tokens."""
    shape = (batch, KV_HEADS, positions, HEAD_DIM)
    return [(torch.zeros(shape), torch.zeros(shape)) for _ in range(CONFIG["num_hidden_layers"])]


def _rope(positions: Tensor) -> tuple[Tensor, Tensor]:
    frequencies = CONFIG["rope_theta"] ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = positions[:, None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * rope[0] + torch.cat([-right, left], dim=-1) * rope[1]
