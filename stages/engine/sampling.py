"""From logits to tokens: temperature, min_p, top_k, top_p, seeded draws, and the log-probs and ranks that are reported.

The order and meaning of the filters are vLLM's: logits are divided by the temperature, then min_p, top_k and top_p
each take away from what the one before left. `processed` log-probs are those of the distribution that the token was
drawn from, so that a trainer's importance ratio is one at the policy that sampled; `raw` ones are the model's own,
whatever the sampling was.

A draw uses one number of the request's own generator and its own row, so a seeded request gives the same tokens
whatever else is in the batch (up to rounding: BLAS adds in another order for another number of rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from stages.engine.weights import F32

LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_NOT_TOP_K = (0, -1)
_SEGMENT = 64
_LEAST = -9999.0  # JSON has no infinity: what was filtered out is reported so, as vLLM does


class SamplingParams(msgspec.Struct, frozen=True):
    """How one request is sampled; names and defaults are vLLM's.

    `logprobs` is None for none, else how many of the best tokens are reported beside the drawn one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def of_copy(self, index: int) -> SamplingParams:
        """Those of the index-th answer to one prompt: each draws from a seed of its own."""
        return self if self.seed is None or not index else msgspec.structs.replace(self, seed=self.seed + index)

    @property
    def greedy(self) -> bool:
        """Temperature 0: the best token is taken and the filters do nothing."""
        return self.temperature < 1e-5

    @property
    def filtered(self) -> bool:
        """Whether anything but the temperature shapes the distribution."""
        return not self.greedy and (self.top_p < 1.0 or self.min_p > 0.0 or self.top_k not in _NOT_TOP_K)


class Candidate(msgspec.Struct, frozen=True):
    """A token with its log-prob and rank (1 is the most likely)."""

    token_id: int
    logprob: float
    rank: int


class Drawn(msgspec.Struct, frozen=True):
    """A drawn token; `best` holds the k most likely of its row, most likely first."""

    chosen: Candidate
    best: tuple[Candidate, ...] = ()


def new_generator(seed: int | None) -> np.random.Generator:
    """A request's own source of randomness: any integer is a seed, None takes the system's entropy."""
    return np.random.default_rng(None if seed is None else seed % 2**64)


def processed_logits(logits: F32, params: Sequence[SamplingParams]) -> F32:
    """Logits (B, vocab) after temperature and filters; what is filtered out is -inf. Never changes its input.

    Where several tokens are exactly as likely as the last one that top_k or top_p keeps, all of them are kept.
    """
    temperatures = [1.0 if one.greedy else one.temperature for one in params]
    shaped = logits
    if any(value != 1.0 for value in temperatures):
        shaped = logits / np.asarray(temperatures, dtype=np.float32)[:, None]
    touched = [row for row, one in enumerate(params) if one.filtered]
    if touched:
        shaped = shaped.copy() if shaped is logits else shaped
        shaped[touched] = _filter(shaped[touched], [params[row] for row in touched])
    return shaped


def _filter(logits: F32, params: Sequence[SamplingParams]) -> F32:
    """Apply min_p, top_k and top_p to rows; each is a smallest logit that stays."""
    vocab = logits.shape[1]
    ordered = np.sort(logits, axis=1)
    lowest = np.full(len(params), -np.inf, dtype=np.float32)
    for row, one in enumerate(params):
        if one.min_p > 0.0:
            lowest[row] = ordered[row, -1] + np.float32(np.log(one.min_p))
        if one.top_k not in _NOT_TOP_K:
            lowest[row] = max(lowest[row], ordered[row, max(0, vocab - one.top_k)])
    weights = np.exp(ordered - ordered[:, -1:])
    weights[ordered < lowest[:, None]] = 0.0
    below = np.cumsum(weights, axis=1, dtype=np.float64)
    spare = (1.0 - np.asarray([one.top_p for one in params])) * below[:, -1]
    # Summed from the least likely up, a token stays once the sum passes 1 - top_p: fewer would not reach top_p.
    first = np.minimum((below <= spare[:, None]).sum(axis=1), vocab - 1)
    lowest = np.maximum(lowest, ordered[np.arange(len(params)), first])
    kept: F32 = np.where(logits < lowest[:, None], np.float32(-np.inf), logits)
    return kept


def log_softmax(logits: F32) -> F32:
    """Log-probs of each row."""
    shifted: F32 = logits - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def token_logprobs(
    logits: F32, token_ids: Sequence[int], params: SamplingParams, mode: LogprobsMode = "processed_logprobs"
) -> F32:
    """Log-probs (n,) of given tokens under logits (n, vocab): recomputes what sampling reported.

    Args:
        logits: of the position before each token.
        token_ids: the tokens that were drawn there.
        params: how they were drawn.
        mode: which distribution is meant.
    """
    shaped = processed_logits(logits, [params] * len(token_ids)) if mode == "processed_logprobs" else logits
    chosen: F32 = log_softmax(shaped)[np.arange(len(token_ids)), np.asarray(token_ids)]
    return chosen


def _pick(weights: F32, params: Sequence[SamplingParams], generators: Sequence[np.random.Generator]) -> list[int]:
    """One token a row, by inverse distribution function; a token of weight 0 is never drawn.

    First a segment of the vocabulary is found, then the token in it: a running sum over a whole row is what costs.
    Running sums are float64: in float32 they would swallow every tail token of less than 6e-8.
    """
    count, vocab = weights.shape
    spare = -vocab % _SEGMENT
    padded = np.pad(weights, ((0, 0), (0, spare))) if spare else weights
    segments = padded.reshape(count, -1, _SEGMENT)
    rows = np.arange(count)
    sums = segments.sum(axis=2)
    uniform = np.array([0.0 if one.greedy else own.random() for one, own in zip(params, generators, strict=True)])
    running = np.cumsum(sums, axis=1, dtype=np.float64)
    segment, point = _locate(running, uniform)
    chosen = sums[rows, segment]
    share = (point - (running[rows, segment] - chosen)) / chosen
    within, _ = _locate(np.cumsum(segments[rows, segment], axis=1, dtype=np.float64), share.clip(0.0, 1.0))
    tokens: list[int] = (segment * _SEGMENT + within).tolist()
    return tokens


def _locate(running: F64, share: F64) -> tuple[I64, F64]:
    """Per row, the first entry whose running sum passes that share of the whole, and the point itself."""
    whole = running[:, -1]
    # The product may round up to the whole, which lies behind the last entry.
    point = np.minimum(share * whole, np.nextafter(whole, 0.0))
    return (running <= point[:, None]).sum(axis=1), point


def _best(logprobs: F32, count: int) -> tuple[Candidate, ...]:
    count = min(count, len(logprobs))
    candidates = np.argpartition(-logprobs, count - 1)[:count]
    ordered = candidates[np.argsort(-logprobs[candidates], kind="stable")]
    return tuple(
        Candidate(int(token), max(float(logprobs[token]), _LEAST), rank) for rank, token in enumerate(ordered, start=1)
    )


def draw(
    logits: F32,
    params: Sequence[SamplingParams],
    generators: Sequence[np.random.Generator],
    mode: LogprobsMode = "processed_logprobs",
) -> list[Drawn]:
    """Draw one token a row.

    Args:
        logits: (B, vocab) of the model.
        params: B requests' parameters.
        generators: B requests' own generators; each sampled (not greedy) row takes one number.
        mode: the distribution whose log-probs and ranks are reported.
    """
    shaped = processed_logits(logits, params)
    shifted = shaped - shaped.max(axis=1, keepdims=True)
    weights = np.exp(shifted)
    tokens = _pick(weights, params, generators)
    for row, one in enumerate(params):
        if one.greedy:
            tokens[row] = int(shifted[row].argmax())
    if all(one.logprobs is None for one in params):
        return [Drawn(Candidate(token, 0.0, 0)) for token in tokens]
    if mode == "raw_logprobs":
        shifted = logits - logits.max(axis=1, keepdims=True)
        weights = np.exp(shifted)
    norms = np.log(weights.sum(axis=1))
    chosen = shifted[np.arange(len(tokens)), tokens]
    ranks = np.count_nonzero(shifted >= chosen[:, None], axis=1).tolist()
    logprobs = (chosen - norms).tolist()
    return [
        Drawn(
            Candidate(token, logprobs[row], ranks[row]),
            _best(shifted[row] - norms[row], one.logprobs) if one.logprobs else (),
        )
        for row, (one, token) in enumerate(zip(params, tokens, strict=True))
    ]


def score_tokens(logits: F32, token_ids: Sequence[int], count: int) -> list[Drawn]:
    """Log-probs and ranks of given tokens (n,) under logits (n, vocab), with the `count` best beside each."""
    scores = log_softmax(logits)
    chosen = scores[np.arange(len(token_ids)), np.asarray(token_ids)]
    ranks = np.count_nonzero(scores >= chosen[:, None], axis=1)
    return [
        Drawn(Candidate(token, float(chosen[row]), int(ranks[row])), _best(scores[row], count) if count else ())
        for row, token in enumerate(token_ids)
    ]
