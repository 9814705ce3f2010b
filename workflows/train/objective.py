"""The arithmetic of GRPO and DAPO: advantages, overlong shaping, ratios, clipping. Pure: torch and NumPy both run it.

Sources: GRPO (arXiv 2402.03300, section 4.1): advantages relative to a group, ratio clipped on both sides, a loss that
is a mean over rollouts of means over tokens. DAPO (arXiv 2503.14476, section 3): another bound above than below, groups
without spread left out, a mean over all tokens, and a penalty that rises softly towards the longest length.

Three policies meet in one token: the one that drew it (`recorded`, the engine's own log-prob, of the version that the
shard names), the one that the update starts from (`started`), and the one being trained (`new`). The ratio that is
clipped is new/started; started/recorded is a constant that weighs the token, cut off above. That is the decoupled
objective of AReaL (arXiv 2505.24298, section 4.2). For a token of the current version started is recorded, and the
weight is 1: the engine's word is taken, so that a gap between engine and trainer is corrected, not ignored.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

_EPSILON = 1e-6

Array = Any
"""A one-dimensional torch.Tensor or numpy.ndarray; functions over arrays take its module as `xp`."""


class Clip(NamedTuple):
    """How far a ratio counts: from 1 - low to 1 + high."""

    low: float
    high: float


def advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards of one group less their mean, over their standard deviation; zeros where they do not differ."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (spread + _EPSILON) for reward in rewards]


def permuted(rewards: Sequence[float], seed: str) -> list[float]:
    """The same rewards in another order: each group keeps its statistics, and nothing that a rollout did counts."""
    shuffled = list(rewards)
    random.Random(seed).shuffle(shuffled)  # noqa: S311 (an experiment is to be repeatable)
    return shuffled


def overlong_penalty(length: int, limit: int, tail: int) -> float:
    """0 up to `limit - tail` sampled tokens, falling in a line to -1 at `limit`, -1 beyond (DAPO, equation 13)."""
    return -min(1.0, max(0.0, (length - (limit - tail)) / tail))


def token_shares(lengths: Sequence[int], rollouts: Sequence[str], *, over_tokens: bool) -> list[float]:
    """What one token of each chain counts in the loss; over all tokens of all chains these add up to 1.

    Args:
        lengths: sampled tokens of each chain.
        rollouts: which rollout each chain is of; all chains of a rollout are here.
        over_tokens: every token counts the same (DAPO); else every rollout does (GRPO).
    """
    if over_tokens:
        return [1 / max(1, sum(lengths))] * len(lengths)
    totals: dict[str, int] = {}
    for rollout, length in zip(rollouts, lengths, strict=True):
        totals[rollout] = totals.get(rollout, 0) + length
    return [1 / (max(1, totals[rollout]) * len(totals)) for rollout in rollouts]


def lag_weights(xp: Any, started: Array, recorded: Array, cap: float) -> Array:
    """exp(started - recorded), at most `cap`: 1 for tokens of the version that the update starts from."""
    return xp.clip(xp.exp(started - recorded), 0.0, cap)


def token_losses(xp: Any, new: Array, started: Array, weights: Array, gains: Array, clip: Clip) -> tuple[Array, Array]:
    """Each token's loss, and where the clip has taken its gradient away (1.0, else 0.0).

    Args:
        xp: the module of the arrays: torch or numpy.
        new: log-probs under the policy being trained; the only argument with a gradient.
        started: log-probs under the policy that the update starts from.
        weights: what `lag_weights` gives.
        gains: the advantage of each token's rollout.
        clip: bounds of the ratio.
    """
    ratio = xp.exp(new - started)
    bounded = xp.clip(ratio, 1 - clip.low, 1 + clip.high)
    losses = -weights * xp.minimum(ratio * gains, bounded * gains)
    clipped = ((ratio > 1 + clip.high) & (gains > 0)) | ((ratio < 1 - clip.low) & (gains < 0))
    return losses, xp.where(clipped, 1.0, 0.0)


def kl_estimates(xp: Any, new: Array, reference: Array) -> Array:
    """Each token's estimate of KL(new || reference): exp(r - n) - (r - n) - 1, never negative (GRPO, equation 4)."""
    difference = reference - new
    return xp.exp(difference) - difference - 1
