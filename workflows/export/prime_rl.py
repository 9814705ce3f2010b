"""prime-rl: a chain as TrainingSample's fields, by name, in both layouts that its releases have had.

`split` has prompt and completion apart, `flat` one stream with a mask. Log-probs and temperatures are aligned with the
completion or the stream; masks are booleans and False on observations. The struct travels as an array whose order
changed between releases: so fields are given by name, and the installed class takes those that it has.
"""

from __future__ import annotations

from typing import Any, Literal

from stages.shards.rows import ShardGroup
from workflows.export.samples import Sample, counts, group_samples, reward_of

Layout = Literal["split", "flat"]


def advantages(group: ShardGroup) -> dict[str, float]:
    """Each counting rollout's reward minus their mean, by rollout id: masked rollouts are in neither."""
    rewards = {row.rollout_id: reward_of(row) for row in group.rows if counts(row)}
    mean = sum(rewards.values()) / len(rewards) if rewards else 0.0
    return {rollout_id: reward - mean for rollout_id, reward in rewards.items()}


def training_sample(sample: Sample, advantage: float, layout: Layout = "split") -> dict[str, Any]:
    """One TrainingSample."""
    temperature = sample.row["sampling"]["temperature"]
    common = {"env_name": sample.row["task"], "reward": sample.reward}
    if layout == "flat":
        size = len(sample.stream)
        return common | {
            "token_ids": sample.stream,
            "mask": [bool(bit) for bit in sample.mask],
            "logprobs": sample.logprobs,
            "temperatures": [temperature] * size,
            "advantages": [advantage * bit for bit in sample.mask],
        }
    return common | {
        "prompt_ids": sample.prompt,
        "prompt_mask": [False] * sample.cut,
        "completion_ids": sample.response,
        "completion_mask": [bool(bit) for bit in sample.response_mask],
        "completion_logprobs": sample.response_logprobs,
        "completion_temperatures": [temperature] * len(sample.response),
        "advantage": advantage,
    }


def to_lines(group: ShardGroup, ordinal: int) -> list[dict[str, Any]]:
    """One TrainingSample a chain, split; all chains of a rollout have its advantage."""
    del ordinal
    gains = advantages(group)
    return [training_sample(sample, gains[sample.row.rollout_id]) for sample in group_samples(group)]
