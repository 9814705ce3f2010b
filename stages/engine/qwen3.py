"""The forward pass of Qwen3 in NumPy: chunked prefill of one row, batched decode over ragged rows, plain log-probs.

The mathematics is that of Qwen3ForCausalLM (RMSNorm before each block, RMSNorm on every query and key head, rotary
positions, grouped-query attention, SwiGLU). For a model of a million parameters the cost of a step is the number of
NumPy calls, not arithmetic, so constants are folded once at load:

- the weight of a norm goes into the matrix that follows it; q, k, v are one matrix, gate and up another;
- the two halves that rotary embedding pairs are interleaved in q's and k's columns (scores do not change when both are
  permuted alike), so that a rotation is one complex multiplication;
- 1/sqrt(head_dim) goes into the weight of the query norm.

Keys and values live in the caller's `rows`: float32 of shape (layers, 2, rows, kv_heads, max_len, head_dim), zeros
where nothing was written: what lies behind a row's length is read and multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stages.engine.weights import F32, ModelConfig, ModelFiles, load_model_files

C64 = npt.NDArray[np.complex64]
I64 = npt.NDArray[np.int64]
Rows = slice | I64
_Attend = Callable[[int, F32, F32, F32], F32]

_FAR = np.float32(-1e30)  # finite: -inf minus -inf would be nan


@dataclass(frozen=True)
class _Layer:
    """One decoder layer, folded: matrices are (inputs, outputs) and contiguous."""

    qkv: F32
    qk_norm: F32
    out: F32
    gate_up: F32
    down: F32


def _interleave(head_dim: int) -> I64:
    """Column order that puts the two members of each rotary pair (i, i + head_dim/2) beside each other."""
    half = head_dim // 2
    return np.stack([np.arange(half), np.arange(half) + half], axis=1).reshape(-1)


def _fold_layer(config: ModelConfig, tensors: dict[str, F32], index: int) -> _Layer:
    def tensor(name: str) -> F32:
        return tensors[f"model.layers.{index}.{name}.weight"]

    head, order = config.head_dim, _interleave(config.head_dim)
    before_attention = tensor("input_layernorm")[:, None]
    before_mlp = tensor("post_attention_layernorm")[:, None]

    def paired(name: str) -> F32:
        return tensor(name).reshape(-1, head, config.hidden_size)[:, order].reshape(-1, config.hidden_size)

    qkv = np.concatenate([paired("self_attn.q_proj"), paired("self_attn.k_proj"), tensor("self_attn.v_proj")])
    norms = [tensor("self_attn.q_norm")[order] / np.float32(np.sqrt(head))] * config.num_attention_heads
    norms += [tensor("self_attn.k_norm")[order]] * config.num_key_value_heads
    return _Layer(
        qkv=np.ascontiguousarray(qkv.T * before_attention),
        qk_norm=np.stack(norms).astype(np.float32),
        out=np.ascontiguousarray(tensor("self_attn.o_proj").T),
        gate_up=np.ascontiguousarray(np.concatenate([tensor("mlp.gate_proj"), tensor("mlp.up_proj")]).T * before_mlp),
        down=np.ascontiguousarray(tensor("mlp.down_proj").T),
    )


class Qwen3:
    """A loaded Qwen3; holds no state of any request.

    Args:
        files: config and tensors as `load_model_files` gives them.
        max_len: positions for which rotations are prepared; longer sequences are the caller's error.
    """

    def __init__(self, files: ModelFiles, max_len: int | None = None) -> None:
        config, tensors = files.config, files.tensors
        self.config = config
        self.max_len = max_len or config.max_position_embeddings
        self._embed = tensors["model.embed_tokens.weight"]
        self._layers = [_fold_layer(config, tensors, index) for index in range(config.num_hidden_layers)]
        head = self._embed if config.tie_word_embeddings else tensors["lm_head.weight"]
        self._head: F32 = np.ascontiguousarray(head.T * tensors["model.norm.weight"][:, None])
        self._groups = config.num_attention_heads // config.num_key_value_heads
        half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        angles = np.arange(self.max_len)[:, None] / config.rope_theta**half
        self._rotations: C64 = np.exp(1j * angles).astype(np.complex64)

    @classmethod
    def load(cls, directory: Path, max_len: int | None = None) -> Qwen3:
        """Read a Hugging Face directory.

        Raises:
            EngineError: the directory holds no usable Qwen3.
        """
        return cls(load_model_files(directory), max_len)

    def new_rows(self, count: int, max_len: int) -> F32:
        """Zeroed keys and values of `count` sequences of at most `max_len` tokens; memory is taken on first use."""
        config = self.config
        shape = (config.num_hidden_layers, 2, count, config.num_key_value_heads, max_len, config.head_dim)
        return np.zeros(shape, dtype=np.float32)

    def _scale(self, x: F32) -> F32:
        """RMSNorm without its weight, over the last axis."""
        power = np.vecdot(x, x)
        power *= np.float32(1.0 / x.shape[-1])
        power += np.float32(self.config.rms_norm_eps)
        np.sqrt(power, out=power)
        scaled: F32 = np.divide(x, power[..., None])
        return scaled

    # For a gate far below zero exp(-gate) is inf, and gate / inf is the 0 that SiLU is there.
    @np.errstate(over="ignore")
    def _run_layers(self, x: F32, rotations: C64, attend: _Attend) -> F32:
        """All layers over x (tokens, hidden), in place; `attend(layer, q, k, v)` stores k and v and looks back."""
        config, tokens = self.config, x.shape[0]
        head, split = config.head_dim, (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
        for index, layer in enumerate(self._layers):
            qkv = self._scale(x) @ layer.qkv
            qk = self._scale(qkv[:, :split].reshape(tokens, -1, head))
            qk *= layer.qk_norm
            turned = qk.view(np.complex64)
            turned *= rotations[:, None]
            seen = attend(
                index,
                qk[:, : config.num_attention_heads],
                qk[:, config.num_attention_heads :],
                qkv[:, split:].reshape(tokens, config.num_key_value_heads, head),
            )
            x += seen @ layer.out
            gate_up = self._scale(x) @ layer.gate_up
            gate, up = gate_up[:, : config.intermediate_size], gate_up[:, config.intermediate_size :]
            silu = np.exp(-gate)
            silu += np.float32(1.0)
            np.divide(gate, silu, out=silu)
            silu *= up
            x += silu @ layer.down
        return x

    def decode(self, tokens: I64, positions: I64, rows: F32, which: Rows) -> F32:
        """One token for each of B sequences: stores its key and value and gives the next token's logits.

        Args:
            tokens: (B,) the last token of each sequence.
            positions: (B,) its position, that is the number of tokens already stored in its row.
            rows: keys and values, see the module's head.
            which: the B rows; a slice is read in place, an index array is copied out first.

        Returns:
            Logits (B, vocab), float32.
        """
        count, longest = len(tokens), int(positions.max()) + 1
        config, groups = self.config, self._groups
        index = np.arange(which.start, which.stop) if isinstance(which, slice) else which
        ragged = count > 1 and int(positions.min()) + 1 != longest
        mask = np.where(np.arange(longest) > positions[:, None], _FAR, np.float32(0.0)) if ragged else None

        def attend(layer: int, q: F32, k: F32, v: F32) -> F32:
            keys, values = rows[layer]
            keys[index, :, positions] = k
            values[index, :, positions] = v
            keys, values = keys[which, :, :longest], values[which, :, :longest]
            grouped = q.reshape(count, config.num_key_value_heads, groups, config.head_dim)
            scores = grouped @ keys.swapaxes(-1, -2)
            if mask is not None:
                scores += mask[:, None, None, :]
            return _weigh(scores, values).reshape(count, -1)

        x = self._run_layers(self._embed[tokens], self._rotations[positions], attend)
        return self._scale(x) @ self._head

    def prefill(self, tokens: I64, start: int, rows: F32, row: int, *, every: bool = False) -> F32:
        """A chunk of one sequence's tokens at positions start, start + 1, ...: stores keys and values.

        Args:
            tokens: (n,) the chunk; positions before `start` must be stored in the row already.
            start: position of the chunk's first token.
            rows: keys and values, see the module's head.
            row: the sequence's row.
            every: give logits after each token of the chunk, not after its last alone.

        Returns:
            Logits (1, vocab), or (n, vocab) with `every`.
        """
        count, end = len(tokens), start + len(tokens)
        config, groups = self.config, self._groups
        kv_heads, head = config.num_key_value_heads, config.head_dim
        later = np.arange(end) > np.arange(start, end)[:, None]
        mask = np.where(later, _FAR, np.float32(0.0))

        def attend(layer: int, q: F32, k: F32, v: F32) -> F32:
            keys, values = rows[layer, :, row]
            keys[:, start:end] = k.swapaxes(0, 1)
            values[:, start:end] = v.swapaxes(0, 1)
            grouped = q.reshape(count, kv_heads, groups, head).transpose(1, 2, 0, 3).reshape(kv_heads, -1, head)
            scores = grouped @ keys[:, :end].swapaxes(-1, -2)
            scores.reshape(kv_heads, groups, count, end)[...] += mask
            seen = _weigh(scores, values[:, :end])
            return seen.reshape(kv_heads, groups, count, head).transpose(2, 0, 1, 3).reshape(count, -1)

        x = self._run_layers(self._embed[tokens], self._rotations[start:end], attend)
        return self._scale(x if every else x[-1:]) @ self._head

    def logits(self, token_ids: Sequence[int]) -> F32:
        """Logits (n, vocab) after each token of a sequence, by one plain pass from nothing."""
        rows = self.new_rows(1, len(token_ids))
        return self.prefill(np.asarray(token_ids, dtype=np.int64), 0, rows, 0, every=True)


def _weigh(scores: F32, values: F32) -> F32:
    """Softmax of scores (..., q, t) and the weighted sum of values (..., t, d); scores are overwritten."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    seen: F32 = scores @ values
    seen /= total
    return seen
