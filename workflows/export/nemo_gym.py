"""NeMo Gym: a chain as a row of its rollouts' JSON lines, in the form of OpenAI's Responses with token ids.

Rules: the last output item of each generation carries `prompt_token_ids` (the whole stream before it),
`generation_token_ids` and `generation_log_probs`, all three or none; each prompt begins with all that came before, so
chains that do not continue one another are rows of their own. Masked rollouts are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from stages.shards.rows import ShardGroup, ShardRow
from workflows.export.samples import Sample, group_samples, messages_of, samples


def _turn_items(sample: Sample, number: int, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Output items of one generation: its text, its tool calls; the last one has the tokens."""
    name = f"{sample.row.rollout_id}-{sample.number}-{number}"
    items: list[dict[str, Any]] = [
        {
            "type": "function_call", "id": f"fc_{name}_{place}", "call_id": call.get("id") or f"call_{name}_{place}",
            "name": call["name"], "arguments": json.dumps(call.get("arguments", {})), "status": "completed",
        }
        for place, call in enumerate(message.get("tool_calls", ()))
    ]  # fmt: skip
    text = message.get("content", "")
    if text or not items:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        said = {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed", "content": content}
        items.insert(0, said)
    start, end = sample.turns[number]
    items[-1] |= {
        "prompt_token_ids": sample.stream[:start],
        "generation_token_ids": sample.stream[start:end],
        "generation_log_probs": sample.logprobs[start:end],
    }
    return items


def _output(sample: Sample, said: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """All output items in order; without a conversation that fits the turns there are tokens alone."""
    replies = [message for message in said if message["role"] == "assistant"]
    if sample.of > 1 or len(replies) != len(sample.turns):
        for number in range(len(sample.turns)):
            yield from _turn_items(sample, number, {})
        return
    number = 0
    calls: list[str] = []
    for message in said:
        if message["role"] == "assistant":
            items = _turn_items(sample, number, message)
            calls = [item["call_id"] for item in items if item["type"] == "function_call"]
            number += 1
            yield from items
        elif message["role"] == "tool" and calls:
            call_id = message.get("tool_call_id") or calls.pop(0)
            yield {"type": "function_call_output", "call_id": call_id, "output": message.get("content", "")}
        else:
            yield {"type": "message", "role": "user", "content": message.get("content", "")}


def gym_row(sample: Sample, task_index: int, rollout_index: int) -> dict[str, Any]:
    """One row, with the chain's identity beside what the contract names."""
    messages = messages_of(sample.row)
    asked = next((place for place, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    sampling = sample.row["sampling"]
    return {
        "_ng_task_index": task_index,
        "_ng_rollout_index": rollout_index,
        "responses_create_params": {
            "input": [{"role": one["role"], "content": one.get("content", "")} for one in messages[:asked]],
            "temperature": sampling["temperature"], "top_p": sampling["top_p"],
            "max_output_tokens": sampling["max_tokens"],
        },
        "response": {
            "id": f"resp_{sample.row.rollout_id}-{sample.number}", "object": "response",
            "created_at": sample.row["finished_at"].timestamp(), "model": sample.row["model"],
            "output": list(_output(sample, messages[asked:])),
            "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
        },
        "reward": sample.reward,
        "mask_sample": False,
    } | sample.identity  # fmt: skip


def to_lines(group: ShardGroup, ordinal: int) -> list[dict[str, Any]]:
    """One row a chain; `_ng_rollout_index` is the rollout's place in its group."""
    order = {rollout_id: number for number, rollout_id in enumerate(group.line.rollout_ids)}
    return [gym_row(sample, ordinal, order[sample.row.rollout_id]) for sample in group_samples(group)]


def to_failures(group: ShardGroup, ordinal: int) -> list[dict[str, Any]]:
    """One row a rollout that failed, for the failures file; a cancelled one never happened and has none."""
    order = {rollout_id: number for number, rollout_id in enumerate(group.line.rollout_ids)}
    return [
        {
            "_ng_task_index": ordinal, "_ng_rollout_index": order[row.rollout_id], "mask_sample": True,
            "failure_class": row.line.failure_class, "rollout_id": row.rollout_id, "group_id": row.line.group_id,
            "task_id": row.line.task_id, "tag": row.line.tag,
        }
        for row in group.rows
        if row.line.status == "failed"
    ]  # fmt: skip


def answer_row(row: ShardRow, task_index: int, rollout_index: int) -> dict[str, Any] | None:
    """The row of one rollout as an answer to its collector: its last chain; None where it sampled nothing."""
    chains = samples(row)
    return gym_row(chains[-1], task_index, rollout_index) if chains else None
