"""Trains the tiny policies of task=arith by imitation: `python -P -m workflows.policies.make OUT`."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pydoc_data.topics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from stages.chat import ChatTokenizer
from workflows.errors import PolicyMakeError
from workflows.policies import bpe, directory, evaluation
from workflows.policies.episodes import expert_tokens
from workflows.policies.network import CONFIG, Qwen3
from workflows.tasks import sums
from workflows.tools import bash

HALF_RANGE = (0.15, 0.36)
"""Success of the half-trained policy: enough for mixed groups, far from done."""

_FILE_FRACTION = 0.5
_LATER_PROBES = 200
"""Steps between probes once the policy is past half-trained."""
_TRAIN_SEED, _PROBE_SEED, _REPORT_SEED = 1000, 2000, 3000

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train."""

    steps: int
    batch: int
    peak_rate: float
    probe_every: int
    budget_s: float

    def rate(self, step: int) -> float:
        """Learning rate: a short rise, then half a cosine down to a twentieth."""
        rise = min(1.0, (step + 1) / 50)
        return self.peak_rate * rise * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / self.steps)))


def main(argv: list[str] | None = None) -> int:
    """Train once and write OUT/tiny and OUT/tiny-half."""
    parser = argparse.ArgumentParser(prog="python -P -m workflows.policies.make", description=main.__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--peak-rate", type=float, default=3e-3)
    parser.add_argument("--probe-every", type=int, default=20, help="steps between probes while half-trained")
    parser.add_argument("--budget-s", type=float, default=1800, help="stop training after this many seconds")
    parser.add_argument("--episodes", type=int, default=1536, help="held-out episodes of the final report")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    plan = Plan(args.steps, args.batch, args.peak_rate, args.probe_every, args.budget_s)
    try:
        _make(args.out, plan, args.episodes)
    except PolicyMakeError as error:
        sys.stderr.write(f"rollmill: {error}\n")
        return 1
    return 0


def _make(out: Path, plan: Plan, episodes: int) -> None:
    tokenizer = bpe.train(_corpus(), CONFIG["vocab_size"])
    chat = directory.write_tokenizer(out / "tiny", tokenizer)
    directory.write_tokenizer(out / "tiny-half", tokenizer)
    model = Qwen3()
    example = expert_tokens(chat, next(sums.generate(0, "train", 1.0)))[0]
    _say(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(example)} tokens: "
        f"{chat.decode(example)!r}"
    )
    history, halves = train(model, chat, plan)
    if not halves:
        raise PolicyMakeError(f"no probe fell into {HALF_RANGE}: give a smaller --probe-every than {plan.probe_every}")
    _finish(out / "tiny", model, chat, history, episodes)
    step, state = halves[len(halves) // 2]
    model.load_state_dict(state)
    _finish(out / "tiny-half", model, chat, [entry for entry in history if entry["step"] <= step], episodes)


def train(model: Qwen3, chat: ChatTokenizer, plan: Plan) -> tuple[list[dict[str, Any]], list[tuple[int, State]]]:
    """Imitate the expert; returns the history and the states whose probe fell into HALF_RANGE, with their steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.peak_rate, betas=(0.9, 0.98), weight_decay=0.01)
    batches = _batches(chat, plan.batch)
    probe_rows = list(itertools.islice(sums.generate(_PROBE_SEED, "heldout", _FILE_FRACTION), 128))
    history: list[dict[str, Any]] = []
    halves: list[tuple[int, State]] = []
    started = time.monotonic()
    success, mean_loss = 0.0, 10.0
    for step in range(1, plan.steps + 1):
        loss = _learn(model, optimizer, plan.rate(step - 1), *next(batches))
        mean_loss = 0.9 * mean_loss + 0.1 * loss
        if step % plan.probe_every:
            continue
        elapsed_s = time.monotonic() - started
        entry: dict[str, Any] = {"step": step, "loss": round(mean_loss, 4), "elapsed_s": round(elapsed_s, 1)}
        learning = mean_loss < 0.5 and success < HALF_RANGE[1]
        if learning or step % _LATER_PROBES == 0:
            entry["success"] = success = sum(evaluation.solved(model, chat, probe_rows, step)) / len(probe_rows)
            if HALF_RANGE[0] <= success <= HALF_RANGE[1]:
                halves.append((step, {name: tensor.clone() for name, tensor in model.state_dict().items()}))
        history.append(entry)
        _say(json.dumps(entry))
        if elapsed_s > plan.budget_s:
            break
    return history, halves


def _learn(model: Qwen3, optimizer: torch.optim.Optimizer, rate: float, ids: torch.Tensor, mask: torch.Tensor) -> float:
    """One step on one batch; returns its loss."""
    model.train()
    for group in optimizer.param_groups:
        group["lr"] = rate
    learnt = mask[:, 1:]
    hidden = model(ids)[:, :-1][learnt]
    loss = functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][learnt])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.item())


def _batches(chat: ChatTokenizer, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids [size, length], padded behind, and a bool tensor of the same shape: where the next token is learnt."""
    rows = sums.generate(_TRAIN_SEED, "train", _FILE_FRACTION)
    while True:
        streams = [expert_tokens(chat, row) for row in itertools.islice(rows, size)]
        length = max(len(ids) for ids, _ in streams)
        ids = torch.zeros(size, length, dtype=torch.long)
        mask = torch.zeros(size, length, dtype=torch.bool)
        for index, (stream, stream_mask) in enumerate(streams):
            ids[index, : len(stream)] = torch.tensor(stream)
            mask[index, : len(stream)] = torch.tensor(stream_mask, dtype=torch.bool)
        yield ids, mask


def _finish(out: Path, model: Qwen3, chat: ChatTokenizer, history: list[dict[str, Any]], episodes: int) -> None:
    """Write weights and log, the log with the measured success."""
    (out / "model.safetensors").write_bytes(directory.weights_content(model.state_dict()))
    rows = list(itertools.islice(sums.generate(_REPORT_SEED, "heldout", _FILE_FRACTION), episodes))
    report = evaluation.report(model, chat, rows, seed=7)
    _say(
        f"{out.name}: {report['success']:.1%} of {episodes} held-out episodes at temperature 1 "
        f"(95 %: {report['low']:.1%} to {report['high']:.1%}); plain {report['plain']:.1%}, "
        f"file {report['file']:.1%}, mixed groups {report['mixed_groups']:.1%}"
    )
    directory.write_log(out, {"steps": history[-1]["step"], "heldout": report, "history": history})


def _corpus() -> Iterator[str]:
    """English from the standard library's help, and the task's own texts."""
    yield from (text for _, text in sorted(pydoc_data.topics.topics.items()) if text.isascii())
    schema = json.dumps(bash.SCHEMA["function"])
    commands = (f"cat {sums.NUMBERS}", "echo $((12+7-4))", "echo $((5*30))")
    calls = [json.dumps({"name": bash.NAME, "arguments": {"command": command}}) for command in commands]
    for row in itertools.islice(sums.generate(0, "train", _FILE_FRACTION), 1000):
        yield f"{bpe.SPECIAL[1]}system\n{sums.SYSTEM}\n{schema}\n"
        yield f"{bpe.SPECIAL[1]}user\n{row['question']}"
        yield from row.get("files", {}).values()
        yield from (f"{bpe.SPECIAL[1]}assistant\n{bpe.TOOL_TAGS[0]}\n{call}\n{bpe.TOOL_TAGS[1]}" for call in calls)
        yield sums.answer_text(row["answer"])


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
