"""What the loop asks of a policy that learns, and the values that pass between them; the real one is torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from workflows.train.objective import Clip
from workflows.train.samples import Sample


@dataclass(frozen=True)
class Rules:
    """What of the configuration the gradient needs."""

    temperature: float
    learning_rate: float
    clip: Clip
    over_tokens: bool
    weight_cap: float
    kl: float


@dataclass(frozen=True)
class Prepared:
    """A sample with the log-probs of its sampled tokens under the policy that the update starts from."""

    sample: Sample
    started: list[float]
    reference: list[float]
    """Under the policy that training began with; empty where no such distance counts."""


@dataclass
class Stats:
    """Sums over the tokens of one update."""

    tokens: int = 0
    clipped: float = 0.0
    entropy: float = 0.0
    weight: float = 0.0
    kl: float = 0.0
    grad_norm: float = 0.0
    """The largest of the update's optimizer steps, before clipping."""


class Learner(Protocol):
    """Weights and optimizer of one policy; `workflows.policies.learner.Learner` is the real one. Blocking."""

    def snapshot(self) -> Any:
        """A copy of the weights."""
        ...

    def logprobs(self, samples: Sequence[Sample], weights: Any = None) -> list[list[float]]:
        """Of each sample's sampled tokens, under the current weights or a snapshot."""
        ...

    def first_logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """The same under the policy that training began with."""
        ...

    def update(self, batch: Sequence[Prepared], stats: Stats) -> None:
        """One optimizer step on these samples, all chains of each rollout; adds to `stats`."""
        ...

    def policy_files(self) -> dict[str, bytes]:
        """The weights as the files of a Hugging Face directory that engines load, by name."""
        ...

    def optimizer_bytes(self) -> bytes:
        """The optimizer's state, for `restore`."""
        ...

    def restore(self, directory: Path, optimizer: bytes) -> None:
        """Go on from a directory of `policy_files` and its optimizer's state."""
        ...
