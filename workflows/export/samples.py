"""What every adapter starts from: the chains that a trainer may learn from, as prompt and response lists."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from stages.shards.rows import ChainView, ShardGroup, ShardRow
from workflows.errors import ExportError

TRUNCATED = frozenset({"policy_timeout", "context_length"})
"""Failure classes of rollouts that count and were cut."""


@dataclass(frozen=True)
class Sample:
    """One chain of a rollout that counts. The response lists have one length; log-probs are 0.0 where the mask is 0.

    Attributes:
        row: the rollout.
        chain: its columns.
        number: which of the rollout's chains with sampled tokens this is, of `of` in all.
        stream: all token ids; the first `cut` of them are the prompt.
        mask: 1 where the token was sampled, over the whole stream.
        logprobs: of the sampled tokens, over the whole stream.
        turns: (start, end) of each generation in the stream.
        finish_reason: of the last generation.
        truncated: whether the rollout was cut by length, turns or time.
    """

    row: ShardRow
    chain: ChainView
    number: int
    of: int
    cut: int
    stream: list[int]
    mask: list[int]
    logprobs: list[float]
    turns: list[tuple[int, int]]
    finish_reason: str
    truncated: bool

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        return self.stream[: self.cut]

    @property
    def response(self) -> list[int]:
        """Token ids after the prompt: sampled ones and observations."""
        return self.stream[self.cut :]

    @property
    def response_mask(self) -> list[int]:
        """The response's mask."""
        return self.mask[self.cut :]

    @property
    def response_logprobs(self) -> list[float]:
        """The response's log-probs."""
        return self.logprobs[self.cut :]

    @property
    def reward(self) -> float:
        """The rollout's reward."""
        return reward_of(self.row)

    @property
    def identity(self) -> dict[str, Any]:
        """What names the chain, for frameworks that take fields of one's own."""
        line = self.row.line
        return {
            "rollout_id": line.rollout_id, "group_id": line.group_id, "task_id": line.task_id, "tag": line.tag,
            "chain": self.chain["chain"], "chains": self.of, "logprobs_mode": self.row["logprobs_mode"],
        }  # fmt: skip


def counts(row: ShardRow) -> bool:
    """Whether a trainer may learn from the rollout: it reached a shard and nothing but the policy decided its end."""
    return not row.line.mask_sample and bool(row.chains)


def reward_of(row: ShardRow) -> float:
    """The reward of a rollout that counts; raises ExportError where there is none."""
    if row.line.reward is None:
        raise ExportError(f"rollout {row.rollout_id}: it is not masked and has no reward: the index is wrong")
    return row.line.reward


def samples(row: ShardRow) -> list[Sample]:
    """The chains that hold a sampled token, of a rollout that counts; none of any other."""
    if not counts(row):
        return []
    chains = [chain for chain in row.chains if any(turn["end"] > turn["start"] for turn in chain["turns"])]
    return [_sample(row, number, len(chains), chain) for number, chain in enumerate(chains)]


def _sample(row: ShardRow, number: int, of: int, chain: ChainView) -> Sample:
    turns, cut = chain["turns"], chain["prompt_length"]
    last = turns[-1]["finish_reason"]
    truncated = last == "length" or row.line.failure_class in TRUNCATED
    spans = [(turn["start"], turn["end"]) for turn in turns]
    return Sample(
        row, chain, number, of, cut, chain["token_ids"], chain["loss_mask"], chain["logprobs"], spans, last, truncated
    )


def group_samples(group: ShardGroup) -> list[Sample]:
    """Those of all its rollouts, in order."""
    return [sample for row in group.rows for sample in samples(row)]


def messages_of(row: ShardRow) -> list[dict[str, Any]]:
    """The conversation, where the run kept it (`shards.messages`)."""
    text = row["messages"]
    return json.loads(text) if text else []
