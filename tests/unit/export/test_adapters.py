"""Adapters against what the frameworks publish: fields, lengths, masks, log-probs, and what is left out."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from stages.layout import RunLayout
from stages.shards import ShardGroup, ShardReader
from stages.trajectory import Chain, Message, Row, ToolCall, Trajectory, Turn, VersionSpan
from tests.unit.export import published
from tests.unit.stages_files.samples import group_line, make_layout, make_row, publish, rows_line, write_rows
from workflows.export import nemo_gym, nemo_rl, prime_rl, skyrl, slime, trl, verl
from workflows.export.export import GROUPS, export
from workflows.export.samples import group_samples

PROMPT, FIRST, SEEN, SECOND = [1, 2, 3], [10, 11], [20, 21, 22], [12, 13, 14]
RESPONSE = FIRST + SEEN + SECOND
MASK = [1, 1, 0, 0, 0, 1, 1, 1]
LOGPROBS = [-0.5, -1.0, 0.0, 0.0, 0.0, -0.25, -2.0, -4.0]


def chain(finish: str = "stop") -> Chain:
    """A prompt of three, two generations, and an observation between them."""
    turns = [Turn(3, 5, "stop", "r", 0, 0.25, 0.5), Turn(8, 11, finish, "r", 3, 0.25, 0.0)]
    spans = [VersionSpan(3, 3, 5), VersionSpan(4, 8, 11)]
    return Chain.of(3, PROMPT + RESPONSE, [0] * 3 + MASK, [0.0] * 3 + LOGPROBS, spans, turns)


TALK = [
    Message("system", "be brief"),
    Message("user", "2 + 2"),
    Message("assistant", "let me see", (ToolCall("shell", {"command": "expr 2 + 2"}, "c1"),), finish_reason="stop"),
    Message("tool", "4", tool_call_id="c1"),
    Message("assistant", "4", finish_reason="stop"),
]


def row(number: int, reward: float | None, chains: Sequence[Chain], **changes: Any) -> Row:
    given = make_row(number, chains, group=changes.pop("group", "g0"))
    given = msgspec.structs.replace(given, trajectory=Trajectory(list(chains), TALK), reward=reward)
    return msgspec.structs.replace(given, **changes)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """g0: reward 1, reward 0 cut by length, a masked failure, reward 1 in two chains; g1: one that never started."""
    layout = make_layout(tmp_path)
    failed = {"status": "failed", "failure_class": "sandbox", "mask_sample": True, "mask_reason": "sandbox"}
    rows = [
        row(0, 1.0, [chain()]),
        row(1, 0.0, [chain("length")], failure_class="context_length"),
        row(2, None, [chain()], **failed),
        row(3, 1.0, [chain(), chain()]),
    ]
    places = write_rows(layout, rows)
    lines = [rows_line(n, one, place) for n, (one, place) in enumerate(zip(rows, places, strict=True), 1)]
    dead = row(4, None, [], group="g1", status="cancelled", failure_class="cancelled", mask_sample=True)
    publish(
        layout,
        [*lines, group_line(5, "g0", ["r0", "r1", "r2", "r3"]), rows_line(6, dead, None), group_line(7, "g1", ["r4"])],
    )
    return layout


@pytest.fixture
def group(layout: RunLayout) -> ShardGroup:
    with ShardReader(layout.root) as reader:
        return next(iter(reader.groups()))


@pytest.fixture(scope="module")
def wheels() -> dict[str, Path]:
    return published.fetch()


def test_samples_are_the_chains_that_count(group: ShardGroup) -> None:
    found = group_samples(group)
    assert [(one.row.rollout_id, one.number, one.of, one.truncated) for one in found] == [
        ("r0", 0, 1, False), ("r1", 0, 1, True), ("r3", 0, 2, False), ("r3", 1, 2, False),
    ]  # fmt: skip
    for one in found:
        assert (one.prompt, one.response, one.response_mask, one.response_logprobs) == (
            PROMPT, RESPONSE, MASK, LOGPROBS,
        )  # fmt: skip


def test_verl_agent_loop_output(group: ShardGroup, wheels: dict[str, Path]) -> None:
    text = published.source(wheels["verl"], "verl/experimental/agent_loop/agent_loop.py")
    known = published.fields(text, "AgentLoopOutput")
    metrics = published.fields(text, "AgentLoopMetrics")
    for record in verl.to_lines(group, 0):
        assert set(record) <= set(known)
        assert {name for name, (_, required) in known.items() if required} <= set(record)
        assert set(record["metrics"]) <= set(metrics)
        assert (record["prompt_ids"], record["response_ids"]) == (PROMPT, RESPONSE)
        assert len(record["response_mask"]) == len(record["response_logprobs"]) == len(RESPONSE)
        assert [p for p, m in zip(record["response_logprobs"], record["response_mask"], strict=True) if not m] == [
            0.0
        ] * 3
        assert (record["extra_fields"]["min_global_steps"], record["extra_fields"]["max_global_steps"]) == (3, 4)
    assert [record["reward_score"] for record in verl.to_lines(group, 0)] == [1.0, 0.0, 1.0, 1.0]


def test_verl_data_proto(group: ShardGroup, wheels: dict[str, Path]) -> None:
    text = published.source(wheels["verl"], "verl/experimental/agent_loop/agent_loop.py")
    fields = verl.data_proto(group_samples(group), prompt_length=5, response_length=10, pad_id=9)
    batch = fields["batch"]
    for name in (*batch, *fields["non_tensor_batch"]):
        assert f'"{name}"' in text or name in {"rollout_id", "task_id", "uid"}, name
    assert batch["prompts"][0].tolist() == [9, 9, 1, 2, 3]
    assert batch["responses"][0].tolist() == [*RESPONSE, 9, 9]
    assert batch["response_mask"][0].tolist() == [*MASK, 0, 0]
    assert batch["attention_mask"][0].tolist() == [0, 0] + [1] * 11 + [0, 0]
    assert batch["position_ids"][0].tolist() == [0, 0, *range(11), 0, 0]
    assert batch["input_ids"].shape == (4, 15) and batch["input_ids"].dtype == np.int64
    assert batch["rollout_log_probs"][0].tolist() == [*LOGPROBS, 0.0, 0.0]
    assert batch["rm_scores"][0].nonzero()[0].tolist() == [len(RESPONSE) - 1]  # on the response's last token
    assert batch["rm_scores"].sum(axis=1).tolist() == [1.0, 0.0, 1.0, 1.0]
    assert fields["non_tensor_batch"]["uid"].tolist() == ["g0"] * 4
    with pytest.raises(ValueError, match="a response of 8 tokens, 7 are allowed"):
        verl.data_proto(group_samples(group), response_length=7)


def test_slime_sample(group: ShardGroup) -> None:
    records = slime.to_lines(group, 2)
    for record in records:
        published.check(record, published.SLIME)
        assert record["tokens"] == PROMPT + RESPONSE
        assert (
            len(record["loss_mask"]) == len(record["rollout_log_probs"]) == record["response_length"] == len(RESPONSE)
        )
        assert record["prompt"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2"}]
        assert record["weight_versions"] == ["3", "4"] and record["group_index"] == 2
    assert [record["status"] for record in records] == ["completed", "truncated", "completed", "completed"]
    assert {record["status"] for record in records} <= published.SLIME_STATUS
    assert len({record["index"] for record in records}) == 4


def test_slimes_indices_are_the_runs_own_whatever_the_groups_are_like(tmp_path: Path) -> None:
    """A group of two rollouts with three chains each, and one of four with one: no index comes twice."""
    layout = make_layout(tmp_path)
    rows = [row(n, 1.0, [chain()] * 3) for n in range(2)] + [row(n, 1.0, [chain()], group="g1") for n in range(2, 6)]
    places = write_rows(layout, rows)
    lines: list[Any] = [rows_line(n, *one) for n, one in enumerate(zip(rows, places, strict=True), 1)]
    publish(layout, [*lines, group_line(7, "g0", ["r0", "r1"]), group_line(8, "g1", [f"r{n}" for n in range(2, 6)])])
    with ShardReader(layout.root) as reader:
        found = [record["index"] for n, group in enumerate(reader.groups()) for record in slime.to_lines(group, n)]
    assert len(set(found)) == 10 and found == sorted(found)


def test_a_chain_whose_generations_are_all_empty_teaches_nothing(tmp_path: Path) -> None:
    layout = make_layout(tmp_path)
    empty = Chain.of(3, PROMPT, [0] * 3, [0.0] * 3, [], [Turn(3, 3, "stop", "r", 0, 0.25, 0.5)])
    rows = [row(0, 1.0, [empty, chain()]), row(1, 1.0, [empty])]
    places = write_rows(layout, rows)
    lines: list[Any] = [rows_line(n, *one) for n, one in enumerate(zip(rows, places, strict=True), 1)]
    publish(layout, [*lines, group_line(3, "g0", ["r0", "r1"])])
    with ShardReader(layout.root) as reader:
        found = group_samples(next(iter(reader.groups())))
    assert [(one.row.rollout_id, one.number, one.of, one.response) for one in found] == [("r0", 0, 1, RESPONSE)]


def test_prime_rl_training_sample(group: ShardGroup) -> None:
    records = prime_rl.to_lines(group, 0)
    for record in records:
        published.check(record, published.PRIME_RL)
        assert (record["prompt_ids"], record["completion_ids"]) == (PROMPT, RESPONSE)
        assert record["prompt_mask"] == [False] * 3
        assert record["completion_mask"] == [bool(bit) for bit in MASK]
        assert record["completion_logprobs"] == LOGPROBS
        assert len(record["completion_temperatures"]) == len(RESPONSE)
    # over the three rollouts that count: neither the masked one nor a second chain moves the mean
    assert [record["advantage"] for record in records] == pytest.approx([1 / 3, -2 / 3, 1 / 3, 1 / 3])
    flat = prime_rl.training_sample(group_samples(group)[0], 0.5, "flat")
    assert set(flat) == published.PRIME_RL_FLAT
    streams = ("token_ids", "mask", "logprobs", "temperatures", "advantages")
    assert {len(flat[name]) for name in streams} == {11}
    assert flat["mask"] == [False] * 3 + [bool(bit) for bit in MASK]
    assert flat["advantages"] == [0.0] * 3 + [0.5 * bit for bit in MASK]


def test_skyrl_generator_output(group: ShardGroup, wheels: dict[str, Path]) -> None:
    base = published.source(wheels["skyrl"], "skyrl/train/generators/base.py")
    text = published.source(wheels["skyrl"], "skyrl/train/utils/trainer_utils.py")
    output = skyrl.generator_output(group)
    assert list(output) == list(published.fields(base, "GeneratorOutput"))
    assert set(output["trajectory_ids"][0]) == set(published.fields(base, "TrajectoryID"))
    validate = published.run(text, "validate_generator_output", np=np, logger=None, TrajectoryID=dict)
    single = skyrl.generator_output(ShardGroup(group.line, group.rows[:3]))
    validate(2, single)  # two rollouts of one chain each count
    assert single["is_last_step"] is None
    assert output["is_last_step"] == [True, True, False, True]
    assert output["loss_masks"] == [MASK] * 4 and output["rollout_logprobs"] == [LOGPROBS] * 4
    assert output["stop_reasons"] == ["stop", "length", "stop", "stop"]
    assert len(output["trajectory_generation_times"]) == 3  # one a trajectory, not one a chain
    assert [one["repetition_id"] for one in output["trajectory_ids"]] == [0, 1, 3, 3]
    broken = single | {"loss_masks": [mask[:-1] for mask in single["loss_masks"]]}
    with pytest.raises(AssertionError, match="same length"):
        validate(2, broken)


def test_trl_rollout_function(group: ShardGroup, wheels: dict[str, Path]) -> None:
    text = published.source(wheels["trl"], "trl/trainer/grpo_trainer.py")
    required = [
        ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "required_keys"
    ]
    output = trl.rollout_output(group)
    assert required == [{"prompt_ids", "completion_ids", "logprobs"}] and required[0] <= set(output)
    assert '"env_mask"' in text
    assert {len(values) for values in output.values()} == {3}  # one completion a rollout, the last chain's
    assert output["completion_ids"] == [RESPONSE] * 3
    assert output["logprobs"] == [LOGPROBS] * 3 and output["env_mask"] == [MASK] * 3
    assert output["reward"] == [1.0, 0.0, 1.0]


def test_nemo_gym_row(group: ShardGroup) -> None:
    records = nemo_gym.to_lines(group, 5)
    first = records[0]
    kinds = ["message", "function_call", "function_call_output", "message"]
    assert [item["type"] for item in first["response"]["output"]] == kinds
    assert first["response"]["output"][2]["call_id"] == first["response"]["output"][1]["call_id"] == "c1"
    assert [message["role"] for message in first["responses_create_params"]["input"]] == ["system", "user"]
    for record in records:
        seen: list[int] = []
        names = set(published.NEMO_GYM.required)
        items = [item for item in record["response"]["output"] if names & set(item)]
        assert len(items) == 2
        for item in items:
            published.check({name: item[name] for name in names}, published.NEMO_GYM)  # all three or none
            assert item["prompt_token_ids"][: len(seen)] == seen
            assert len(item["generation_token_ids"]) == len(item["generation_log_probs"])
            seen = item["prompt_token_ids"] + item["generation_token_ids"]
        assert seen == PROMPT + RESPONSE
        assert [item["generation_token_ids"] for item in items] == [FIRST, SECOND]
        assert record["mask_sample"] is False and isinstance(record["reward"], float)
    assert [(record["_ng_task_index"], record["_ng_rollout_index"]) for record in records] == [
        (5, 0), (5, 1), (5, 3), (5, 3),
    ]  # fmt: skip


def test_nemo_gyms_failures_lie_beside_and_what_was_cancelled_nowhere(layout: RunLayout, tmp_path: Path) -> None:
    export(layout.root, "nemo-gym", tmp_path / "rows.jsonl")
    (failed,) = map(json.loads, (tmp_path / "rows_failures.jsonl").read_text().splitlines())
    assert (failed["_ng_task_index"], failed["_ng_rollout_index"], failed["failure_class"]) == (0, 2, "sandbox")
    assert failed["mask_sample"] is True and "reward" not in failed
    done = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert (0, 2) not in {(one["_ng_task_index"], one["_ng_rollout_index"]) for one in done}


def test_nemo_rl_datum(group: ShardGroup) -> None:
    record = nemo_rl.datum(group_samples(group)[0], 7)
    published.check(record, published.NEMO_RL)
    log = record["message_log"]
    assert [message["role"] for message in log] == ["user", "assistant", "tool", "assistant"]
    assert [token for message in log for token in message["token_ids"]] == PROMPT + RESPONSE
    assert record["length"] == 11
    # the trainer's own rule gives our mask: 1 on every token of an assistant message
    mask = [int(message["role"] == "assistant") for message in log for _ in message["token_ids"]]
    assert mask == [0] * 3 + MASK
    for message in log:
        assert ("generation_logprobs" in message) == (message["role"] == "assistant")
        if message["role"] == "assistant":
            assert len(message["generation_logprobs"]) == len(message["token_ids"])


@pytest.mark.parametrize("name", sorted(GROUPS))
def test_each_format_exports_the_lines_of_its_adapter(
    layout: RunLayout, group: ShardGroup, tmp_path: Path, name: str
) -> None:
    output = tmp_path / "out.jsonl"
    counted = export(layout.root, name, output)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines == json.loads(json.dumps(GROUPS[name](group, 0)))
    assert (counted.rollouts, counted.chains, counted.masked, counted.without_row) == (3, 4, 1, 1)
    assert counted.bytes == output.stat().st_size
