"""TRL: the rollouts of a group as what GRPOTrainer's `rollout_func` returns.

Rules of TRL 1.16.0: `prompt_ids`, `completion_ids` and `logprobs` must be there, with one list a completion, flat;
`env_mask` is 1 on the model's tokens; every other key goes to the reward functions, here `reward`. The trainer wants
exactly one completion a rollout: of several chains the last is given, in which the rollout ended. Masked rollouts are
left out: whoever calls for them asks for more until the number is right.
"""

from __future__ import annotations

from typing import Any

from stages.shards.rows import ShardGroup
from workflows.export.samples import group_samples


def rollout_output(group: ShardGroup) -> dict[str, list[Any]]:
    """The dictionary for one prompt; those of several prompts are joined list by list."""
    last = [sample for sample in group_samples(group) if sample.number == sample.of - 1]
    return {
        "prompt_ids": [sample.prompt for sample in last],
        "completion_ids": [sample.response for sample in last],
        "logprobs": [sample.response_logprobs for sample in last],
        "env_mask": [sample.response_mask for sample in last],
        "reward": [sample.reward for sample in last],
        "rollout_id": [sample.row.rollout_id for sample in last],
    }


def to_lines(group: ShardGroup, ordinal: int) -> list[dict[str, Any]]:
    """One dictionary, or none where no rollout of the group counts."""
    del ordinal
    output = rollout_output(group)
    return [output] if output["prompt_ids"] else []
