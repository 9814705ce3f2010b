"""verl: a chain as AgentLoopOutput's fields, and a batch of chains as DataProto's.

Rules of verl 0.9.1: a response holds generated and observed tokens, its mask is 1 on the generated ones, log-probs are
as long as the response and 0.0 on observations; prompts are padded on the left, responses on the right; the reward
stands on the response's last token. There is no mask for a whole sample, so masked rollouts are left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from stages.shards.packing import pad_split
from stages.shards.rows import ShardGroup
from workflows.export.samples import Sample, group_samples


def agent_loop_output(sample: Sample) -> dict[str, Any]:
    """Arguments of verl.experimental.agent_loop.agent_loop.AgentLoopOutput; `extra_fields` names the chain.

    `min_global_steps` and `max_global_steps` are the oldest and newest policy version that sampled in it.
    """
    timing = sample.row["timing"]
    versions = [span["version"] for span in sample.chain["policy_versions"]]
    steps = {"min_global_steps": min(versions, default=None), "max_global_steps": max(versions, default=None)}
    return {
        "prompt_ids": sample.prompt,
        "response_ids": sample.response,
        "response_mask": sample.response_mask,
        "response_logprobs": sample.response_logprobs,
        "reward_score": sample.reward,
        "num_turns": 2 * len(sample.turns),  # the prompt or an observation before each generation
        "metrics": {
            "generate_sequences": timing["llm_s"], "tool_calls": timing["tool_s"], "compute_score": timing["eval_s"],
        },
        "extra_fields": sample.identity | steps,
    }  # fmt: skip


def data_proto(
    samples: Sequence[Sample], *, prompt_length: int | None = None, response_length: int | None = None, pad_id: int = 0
) -> dict[str, dict[str, Any]]:
    """`batch`, `non_tensor_batch` and `meta_info` of a verl.DataProto, in NumPy arrays: DataProto.from_dict takes them.

    Raises:
        ValueError: a prompt or a response is longer than allowed.
    """
    np = importlib.import_module("numpy")
    chains = [sample.chain for sample in samples]
    arrays = pad_split(chains, prompt_length=prompt_length, response_length=response_length, pad_id=pad_id)
    scores = np.zeros(arrays["responses"].shape, np.float32)
    for line, sample in zip(scores, samples, strict=True):
        line[len(sample.response) - 1] = sample.reward
    integers = ("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids")
    names = {"uid": "group_id", "rollout_id": "rollout_id", "task_id": "task_id"}
    return {
        "batch": {name: arrays[name].astype(np.int64) for name in integers}
        | {"rollout_log_probs": arrays["logprobs"], "rm_scores": scores},
        "non_tensor_batch": {
            name: np.array([sample.identity[key] for sample in samples], object) for name, key in names.items()
        }
        | {"__num_turns__": np.array([2 * len(sample.turns) for sample in samples], np.int32)},
        "meta_info": {"metrics": [agent_loop_output(sample)["metrics"] for sample in samples]},
    }


def to_lines(group: ShardGroup, ordinal: int) -> list[dict[str, Any]]:
    """One AgentLoopOutput a chain."""
    del ordinal
    return [agent_loop_output(sample) for sample in group_samples(group)]
