"""NeMo RL: a chain as a DatumSpec, whose message log has the tokens message by message.

Rules: the trainer derives the loss mask from roles, 1 on every token of an `assistant` message and 0 on all others; so
each generation is an assistant message of exactly its sampled tokens, with `generation_logprobs` as long as they are,
and what lies between is a message of another role without log-probs. `loss_multiplier` 0 would mask a whole sample;
masked rollouts have no reward and are left out.
"""

from __future__ import annotations

from typing import Any

from workflows.export.samples import Sample


def datum(sample: Sample, idx: int) -> dict[str, Any]:
    """Keys of nemo_rl.data.interfaces.DatumSpec, token lists in place of tensors, and `total_reward`."""
    log: list[dict[str, Any]] = []
    seen = 0
    for start, end in sample.turns:
        if start > seen:
            role = "user" if seen == 0 else "tool"
            log.append({"role": role, "content": "", "token_ids": sample.stream[seen:start]})
        generated = {"token_ids": sample.stream[start:end], "generation_logprobs": sample.logprobs[start:end]}
        log.append({"role": "assistant", "content": ""} | generated)
        seen = end
    if seen < len(sample.stream):
        log.append({"role": "tool", "content": "", "token_ids": sample.stream[seen:]})
    return {
        "message_log": log,
        "length": len(sample.stream),
        "extra_env_info": sample.identity,
        "loss_multiplier": 1.0,
        "idx": idx,
        "task_name": sample.row["task"],
        "total_reward": sample.reward,
    }
