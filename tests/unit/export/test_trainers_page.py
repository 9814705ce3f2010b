"""docs/trainers.md: every loop is under 40 lines and runs, on a run directory, with stand-ins for the frameworks."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from stages.layout import RunLayout
from tests.unit.stages_files.samples import (
    group_line,
    make_chain,
    make_layout,
    make_row,
    publish,
    rows_line,
    write_rows,
)

PAGE = Path(__file__).parents[3] / "docs" / "trainers.md"
LOOPS = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S))
SIZE = 2
TASKS = [{"task_id": "t0"}, {"task_id": "t1"}]


class FakeClient:
    """Notes what is asked; the groups are in the run directory already, g<n> for the n-th task asked for."""

    def __init__(self, run_dir: Path) -> None:
        self.submitted: list[dict[str, Any]] = []
        self.policies: list[tuple[int, Any]] = []
        CLIENTS.append(self)

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, tasks: list[dict[str, Any]], *, group_size: int, tag: str) -> list[dict[str, Any]]:
        assert tag == "train", "what the reader reads"
        first = len(self.submitted)
        self.submitted += [task | {"group_size": group_size} for task in tasks]
        return [{"group_id": f"g{first + n}", "task_id": task["task_id"]} for n, task in enumerate(tasks)]

    def policy(self, version: int, *, weights_path: Any = None) -> None:
        self.policies.append((version, weights_path))


class AsyncFakeClient(FakeClient):
    async def submit(self, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        return super().submit(*args, **options)


CLIENTS: list[FakeClient] = []


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """Two groups of two rollouts, g1 closed before g0, and before them an evaluation's and one of an earlier start."""
    return published(make_layout(tmp_path), {"eval": 6, "g-stale": 4, "g1": 2, "g0": 0})


def published(layout: RunLayout, groups: dict[str, int], masked: tuple[int, ...] = ()) -> RunLayout:
    """Groups in the order of closing, each with the number of its first rollout; rewards are 0 and 1 in turn."""
    rows = []
    for group, first in groups.items():
        for n in range(first, first + SIZE):
            made = make_row(n, [make_chain(6 + n)], group=group, tag="eval" if group == "eval" else "train")
            rows.append(msgspec.structs.replace(made, reward=float(n % 2), mask_sample=n in masked))
    places = write_rows(layout, rows)
    lines: list[Any] = [rows_line(n, *one) for n, one in enumerate(zip(rows, places, strict=True), 1)]
    for seq, (group, first) in enumerate(groups.items(), len(lines) + 1):
        tag = "eval" if group == "eval" else "train"
        lines.append(group_line(seq, group, [f"r{n}" for n in range(first, first + SIZE)], tag=tag))
    publish(layout, lines)
    return layout


def module(patch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    """A stand-in, with the packages above it."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        patch.setitem(sys.modules, ".".join(parts[:depth]), types.ModuleType(parts[depth - 1]))
    made = types.ModuleType(name)
    vars(made).update(names)
    patch.setitem(sys.modules, name, made)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs a section's code and gives its names."""
    CLIENTS.clear()
    monkeypatch.setattr("stages.client.RolloutClient", FakeClient)
    monkeypatch.setattr("stages.client.AsyncRolloutClient", AsyncFakeClient)

    def run(section: str) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": section}
        exec(compile(LOOPS[section], f"{PAGE}: {section}", "exec"), names)
        return names

    return run


def test_every_framework_has_a_loop_of_under_40_lines() -> None:
    assert set(LOOPS) == {
        "A loop of your own", "verl", "TRL", "slime", "prime-rl", "SkyRL", "NeMo RL", "NeMo Gym",
    }  # fmt: skip
    assert {name: len(text.splitlines()) for name, text in LOOPS.items() if len(text.splitlines()) >= 40} == {}


def test_a_loop_of_your_own(loop: Any, layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "torch", from_numpy=lambda array: array, tensor=np.array)
    seen = []

    def policy_loss(batch: Any, gains: Any) -> Any:
        seen.append((batch, gains.tolist()))
        return types.SimpleNamespace(backward=lambda: None)

    model = types.SimpleNamespace(policy_loss=policy_loss)
    optimizer = types.SimpleNamespace(step=lambda: None, zero_grad=lambda: None)
    loop("A loop of your own")["train"](layout.root, TASKS, model, optimizer, 1, lambda model, step: f"w{step}")
    assert [gains for _, gains in seen] == [[-0.5, 0.5]] * 2
    assert [batch["lengths"].tolist() for batch, _ in seen] == [[6, 7], [8, 9]]
    assert CLIENTS[0].policies == [(1, "w1")]


def test_verl(loop: Any, layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def from_dict(tensors: Any, non_tensors: Any, meta_info: Any) -> Any:
        made.append((tensors, non_tensors, meta_info))
        return tensors

    module(monkeypatch, "torch", from_numpy=lambda array: array)
    module(monkeypatch, "verl", DataProto=types.SimpleNamespace(from_dict=from_dict))
    prompts = types.SimpleNamespace(non_tensor_batch={"task_id": np.array(["t0", "t1"], object)})
    steps: list[Any] = []
    loop("verl")["train"](layout.root, steps.append, [prompts], lambda step: f"w{step}")
    assert steps[0]["responses"].shape == (4, 8192) and steps[0]["prompts"].shape == (4, 2048)
    assert made[0][1]["uid"].tolist() == ["g0", "g0", "g1", "g1"]
    assert CLIENTS[0].policies == [(1, "w1")]


def test_trl(loop: Any, layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []

    class GRPOTrainer:
        def __init__(self, model: Any, reward_funcs: Any, train_dataset: Any, rollout_func: Any) -> None:
            self.data, self.call, self.reward = train_dataset, rollout_func, reward_funcs
            self.state = types.SimpleNamespace(global_step=1)

        def train(self) -> None:
            output = self.call(self.data, self)
            outputs.append(output | {"scores": self.reward(completions=[], **output)})

    module(monkeypatch, "trl", GRPOTrainer=GRPOTrainer)
    prompts = ["t0", "t0", "t1", "t1"]
    loop("TRL")["train"](layout.root, "model", prompts, lambda prompt: prompt, lambda trainer, step: f"w{step}")
    assert outputs[0]["rollout_id"] == ["r0", "r1", "r2", "r3"] and outputs[0]["scores"] == [0.0, 1.0, 0.0, 1.0]
    assert [task["group_size"] for task in CLIENTS[0].submitted] == [2, 2]
    assert CLIENTS[0].policies == [(1, "w1")]


def test_slime(loop: Any, layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "slime.utils.types", Sample=types.SimpleNamespace(from_dict=dict))
    source = types.SimpleNamespace(
        get_samples=lambda count: [[types.SimpleNamespace(metadata=TASKS[n])] * SIZE for n in range(count)]
    )
    args = types.SimpleNamespace(
        rollmill_run_dir=layout.root, rollout_batch_size=2, n_samples_per_prompt=SIZE, save_path=lambda step: f"w{step}"
    )
    found = loop("slime")["generate_rollout"](args, 3, source)
    assert [[one["session_id"] for one in group] for group in found] == [["r0", "r1"], ["r2", "r3"]]
    assert [one["group_index"] for group in found for one in group] == [0, 0, 1, 1]
    assert CLIENTS[0].policies == [(3, "w3")]


def test_slime_asks_again_for_what_came_back_short(loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first task's group, not the last's, lacks a rollout; g2 is the first task again."""
    layout = published(make_layout(tmp_path), {"g1": 2, "g0": 0, "g-stale": 6, "g2": 4}, masked=(1,))
    module(monkeypatch, "slime.utils.types", Sample=types.SimpleNamespace(from_dict=dict))
    source = types.SimpleNamespace(
        get_samples=lambda count: [[types.SimpleNamespace(metadata=TASKS[n])] * SIZE for n in range(count)]
    )
    args = types.SimpleNamespace(rollmill_run_dir=layout.root, rollout_batch_size=2, n_samples_per_prompt=SIZE)
    found = loop("slime")["generate_rollout"](args, 0, source)
    assert [task["task_id"] for task in CLIENTS[0].submitted] == ["t0", "t1", "t0"]
    assert [[one["session_id"] for one in group] for group in found] == [["r4", "r5"], ["r2", "r3"]]
    assert [one["group_index"] for group in found for one in group] == [0, 0, 1, 1]


@pytest.mark.parametrize("layout_name", ["split", "flat"])
def test_prime_rl(loop: Any, layout: RunLayout, monkeypatch: pytest.MonkeyPatch, layout_name: str) -> None:
    fields = {
        "split": [("prompt_ids", list[int]), ("completion_ids", list[int]), ("advantage", float | None, None)],
        "flat": [("token_ids", list[int]), ("mask", list[bool]), ("advantages", list[float] | None, None)],
    }
    sample = msgspec.defstruct("TrainingSample", fields[layout_name], array_like=True)  # type: ignore[arg-type]
    batch = msgspec.defstruct("TrainingBatch", [("examples", list), ("step", int)], array_like=True)
    module(monkeypatch, "prime_rl.transport.types", TrainingSample=sample, TrainingBatch=batch)
    sent: list[Any] = []
    sender = types.SimpleNamespace(
        send=lambda one: sent.append(msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=batch))
    )
    loop("prime-rl")["train"](layout.root, TASKS, sender, 1, lambda step: f"w{step}", layout_name)
    assert sent[0].step == 0 and len(sent[0].examples) == 4
    examples = [msgspec.convert(one, sample) for one in sent[0].examples]
    streams = [one.token_ids if layout_name == "flat" else one.prompt_ids + one.completion_ids for one in examples]
    assert [len(stream) for stream in streams] == [6, 7, 8, 9], "g0's, then g1's"


def test_skyrl(loop: Any, layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = type("TrajectoryID", (types.SimpleNamespace,), {})
    module(monkeypatch, "skyrl.train.generators.base", GeneratorInterface=object, TrajectoryID=identity)
    ids = [identity(instance_id=f"t{n // SIZE}", repetition_id=n % SIZE) for n in range(2 * SIZE)]
    trainer = types.SimpleNamespace()

    async def steps() -> None:
        trainer.output = await trainer.generator.generate({"trajectory_ids": ids})

    trainer.train = steps
    loop("SkyRL")["train"](trainer, layout.root)
    assert trainer.output["rewards"] == [0.0, 1.0, 0.0, 1.0]
    assert [one.repetition_id for one in trainer.output["trajectory_ids"]] == [0, 1, 0, 1]
    assert trainer.output["is_last_step"] is None and len(trainer.output["loss_masks"]) == 4


def test_nemo_rl(loop: Any, layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "torch", tensor=np.array)
    seen: list[Any] = []
    loop("NeMo RL")["train"](layout.root, TASKS, seen.append, 1, lambda step: f"w{step}")
    assert [datum["total_reward"] for datum in seen[0]] == [0.0, 1.0, 0.0, 1.0]
    assert isinstance(seen[0][0]["message_log"][1]["generation_logprobs"], np.ndarray)
    assert CLIENTS[0].policies == [(1, "w1")]


def test_nemo_gym(loop: Any, layout: RunLayout, tmp_path: Path) -> None:
    loop("NeMo Gym")["train"](layout.root, TASKS, tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["_ng_task_index"] for row in rows] == [1, 1, 0, 0]
