"""SkyRL: the rollouts of a group as a GeneratorOutput, whose lists have one entry a chain.

Rules of SkyRL 0.3.0: masks and log-probs are as long as the response; a response that is not a rollout's last carries
`is_last_step` False, which the trainer reads in step-wise training alone. Masked rollouts are left out.
"""

from __future__ import annotations

from typing import Any

from stages.shards.rows import ShardGroup
from workflows.export.samples import group_samples


def generator_output(group: ShardGroup) -> dict[str, Any]:
    """All keys of skyrl.train.generators.base.GeneratorOutput; `trajectory_ids` as arguments of its TrajectoryID."""
    chains = group_samples(group)
    order = {rollout_id: number for number, rollout_id in enumerate(group.line.rollout_ids)}
    stepwise = any(sample.of > 1 for sample in chains)
    first = [sample for sample in chains if sample.number == 0]
    return {
        "prompt_token_ids": [sample.prompt for sample in chains],
        "response_ids": [sample.response for sample in chains],
        "rewards": [sample.reward for sample in chains],
        "loss_masks": [sample.response_mask for sample in chains],
        "stop_reasons": ["length" if sample.truncated else "stop" for sample in chains],
        "rollout_metrics": None,
        "rollout_logprobs": [sample.response_logprobs for sample in chains],
        "trajectory_ids": [
            {"instance_id": sample.row.line.task_id, "repetition_id": order[sample.row.rollout_id]} for sample in chains
        ],
        "trajectory_generation_times": [sample.row["timing"]["run_s"] for sample in first],
        "rollout_expert_indices": None,
        "is_last_step": [sample.number == sample.of - 1 for sample in chains] if stepwise else None,
        "env_metrics": None,
        "pixel_values": None,
        "image_grid_thw": None,
    }


def to_lines(group: ShardGroup, ordinal: int) -> list[dict[str, Any]]:
    """One GeneratorOutput, or none where no rollout of the group counts."""
    del ordinal
    output = generator_output(group)
    return [output] if output["response_ids"] else []
