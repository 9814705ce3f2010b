"""Every key of workflow=train: the algorithm, its batches, its limits, and how learning is measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from conf.limits import Count, CountOrZero, Range, Seconds

Positive = Annotated[float, Range(low=0, open_low=True)]
"""A number above zero."""
PositiveOrZero = Annotated[float, Range(low=0)]
"""A number that is not negative."""


@dataclass(frozen=True, kw_only=True)
class Heldout:
    """Problems that nobody trains on, solved now and then by the policy of the moment."""

    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the Task class that give these problems, over task.options; none: nothing is measured."""
    problems: Count = 512
    """Problems of the first and the last measurement, one rollout each."""
    probe: Count = 128
    """Problems of the measurements between them: the first so many of the same."""
    every: CountOrZero = 10
    """Updates between measurements; 0: only the first and the last."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """workflow=train."""

    algorithm: Literal["dapo", "grpo"] = "dapo"
    """dapo: clip-higher, dynamic sampling, a loss over tokens, overlong shaping; grpo: none of them."""
    mode: Literal["sync", "async"] = "sync"
    """async: the next update's rollouts are asked for before this one is computed, so they may be one version old."""
    steps: Count = 60
    """Updates of the policy: each is pushed as a version of its own."""
    stop_after_s: Seconds | None = None
    """Seconds of training, its measurements included, after which no further update is begun; null: all steps."""
    groups: Count = 12
    """Groups of one update; dapo goes on asking until so many have rewards that differ."""
    waves: Count = 4
    """Times that dapo asks for more groups for one update; then it takes what there is."""
    minibatches: Count = 2
    """Optimizer steps of one update, each on a part of its rollouts."""
    epochs: Count = 1
    """Times that an update goes over its rollouts."""
    learning_rate: Positive = 2e-4
    """Of Adam; it is reached after a few steps."""
    clip: Positive = 0.2
    """How far the ratio of new to old probability counts below 1, and above it."""
    clip_higher: Positive = 0.28
    """The same above 1, for dapo."""
    overlong: Count | None = None
    """Sampled tokens of a rollout above which dapo's reward is 1 lower; null: no such shaping."""
    overlong_tail: Count = 32
    """Tokens below train.overlong over which that penalty rises from 0."""
    kl: PositiveOrZero = 0.0
    """Weight of the distance to the policy that training began with; 0: none."""
    weight_cap: Positive = 2.0
    """Most that a token of an older version weighs, by how likely it is now to how likely it was when drawn."""
    rewards: Literal["verifier", "permuted"] = "verifier"
    """permuted: within each group the rewards change places, so that there is nothing to learn. A control."""
    tokens: Literal["exact", "reencoded"] = "exact"
    """reencoded: learn from the text of the rollouts, encoded again, as trainers without token ids do. An ablation."""
    threads: Count = 2
    """Threads of torch."""
    keep: Annotated[int, Range(low=2)] = 3
    """Versions whose weights stay on disk; a trainer that comes back needs the last two."""
    heldout: Heldout = field(default_factory=Heldout)
    """Problems that nobody trains on."""
