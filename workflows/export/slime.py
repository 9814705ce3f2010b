"""slime: a chain as the fields of slime.utils.types.Sample, as its `from_dict` takes them.

Rules: `tokens` is prompt and response in one; `loss_mask` and `rollout_log_probs` are as long as the response alone;
`group_index` and `index` are numbers. Masked rollouts are left out: slime would take their missing reward for one.
"""

from __future__ import annotations

from typing import Any

from stages.shards.rows import ShardGroup
from workflows.export.samples import Sample, group_samples, messages_of

CHAIN_BITS = 16
"""More chains than any group has; seqs below 2**47 stay whole in 64 bits."""


def slime_sample(sample: Sample, group_index: int, index: int) -> dict[str, Any]:
    """One Sample; `response` stays empty, since training reads the tokens."""
    prompt = []
    for message in messages_of(sample.row):
        if message["role"] == "assistant":
            break
        prompt.append({"role": message["role"], "content": message.get("content", "")})
    return {
        "group_index": group_index,
        "index": index,
        "prompt": prompt,
        "tokens": sample.stream,
        "response": "",
        "response_length": len(sample.response),
        "reward": sample.reward,
        "loss_mask": sample.response_mask,
        "weight_versions": [str(span["version"]) for span in sample.chain["policy_versions"]],
        "rollout_log_probs": sample.response_logprobs,
        "remove_sample": False,
        "status": "truncated" if sample.truncated else "completed",
        "metadata": sample.identity,
        "session_id": sample.row.rollout_id,
        "non_generation_time": sample.row["timing"]["tool_s"],
    }


def to_lines(group: ShardGroup, ordinal: int) -> list[dict[str, Any]]:
    """One Sample a chain; `group_index` is the ordinal, and no two chains of a run have one `index`."""
    # A group's seq is the run's own count and never comes again; its chains count below it.
    first = group.line.seq << CHAIN_BITS
    return [slime_sample(sample, ordinal, first + number) for number, sample in enumerate(group_samples(group))]
