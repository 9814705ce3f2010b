"""The policy that learns: its log-probs are the engine's, its gradient is the objective's, and it comes back whole."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.engine.qwen3 import Qwen3
from stages.engine.sampling import log_softmax
from tests.support.numpy_policy import POLICIES
from workflows.errors import TrainError
from workflows.policies.learner import Learner
from workflows.train import objective
from workflows.train.learning import Prepared, Rules, Stats
from workflows.train.objective import Clip
from workflows.train.plots import picture
from workflows.train.records import Record
from workflows.train.samples import Sample

RULES = Rules(1.0, 1e-3, Clip(0.2, 0.28), True, 2.0, 0.0)
DIRECTORY = POLICIES / "tiny-half"


def sample(seed: int, length: int = 24) -> Sample:
    draw = np.random.default_rng(seed)
    ids = draw.integers(3, 1000, length).tolist()
    places = sorted(draw.choice(np.arange(1, length), length // 3, replace=False).tolist())
    return Sample(ids, places, [-1.0] * len(places), [0] * len(places))


SAMPLES = [sample(seed, 20 + 7 * seed) for seed in range(5)]


def learner(**rules: float) -> Learner:
    return Learner(DIRECTORY, replace(RULES, **rules), 1)  # type: ignore[arg-type]


def prepared(one: Learner, gains: list[float]) -> list[Prepared]:
    now = one.logprobs(SAMPLES)
    return [
        Prepared(replace(given, gain=gain, recorded=values), values, [])
        for given, gain, values in zip(SAMPLES, gains, now, strict=True)
    ]


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_log_probs_are_those_of_the_engine(temperature: float) -> None:
    model = Qwen3.load(DIRECTORY)
    for given, found in zip(SAMPLES, learner(temperature=temperature).logprobs(SAMPLES), strict=True):
        every = log_softmax(model.logits(given.ids) / np.float32(temperature))
        wanted = [every[place - 1, given.ids[place]] for place in given.places]
        assert found == pytest.approx(wanted, abs=2e-5)


def test_an_update_makes_good_tokens_likelier_and_bad_ones_less() -> None:
    one = learner()
    batch = prepared(one, [1.0, -1.0, 1.0, -1.0, 0.0])
    before = [sum(values) for values in one.logprobs(SAMPLES)]
    stats = Stats()
    for _ in range(3):
        one.update(batch, stats)
    after = [sum(values) for values in one.logprobs(SAMPLES)]
    assert [new > old for new, old in zip(after[:4], before[:4], strict=True)] == [True, False, True, False]
    assert stats.tokens == 3 * sum(len(given.places) for given in SAMPLES) and stats.grad_norm > 0


def test_without_advantages_nothing_changes() -> None:
    one = learner()
    one.update(prepared(one, [0.0] * 5), Stats())
    assert one.logprobs(SAMPLES) == one.first_logprobs(SAMPLES)


def test_the_distance_to_the_first_policy_pulls_back() -> None:
    far = learner()
    for _ in range(4):
        far.update(prepared(far, [1.0, -1.0, 1.0, -1.0, 0.0]), Stats())
    held = learner(kl=20.0)
    for _ in range(4):
        batch = prepared(held, [1.0, -1.0, 1.0, -1.0, 0.0])
        firsts = held.first_logprobs(SAMPLES)
        held.update([replace(given, reference=first) for given, first in zip(batch, firsts, strict=True)], Stats())

    def moved(one: Learner) -> float:
        pairs = zip(one.logprobs(SAMPLES), one.first_logprobs(SAMPLES), strict=True)
        return sum(abs(new - old) for news, olds in pairs for new, old in zip(news, olds, strict=True))

    assert moved(held) < moved(far)


def test_over_rollouts_two_chains_of_one_share_its_weight() -> None:
    def norm(rollouts: tuple[str, str]) -> float:
        one, stats = Learner(DIRECTORY, replace(RULES, over_tokens=False), 1), Stats()
        batch = prepared(one, [1.0, 0.0, 0.0, 0.0, 0.0])[:2]
        one.update(
            [
                replace(given, sample=replace(given.sample, rollout=name))
                for given, name in zip(batch, rollouts, strict=True)
            ],
            stats,
        )
        return stats.grad_norm

    first, second = (len(given.places) for given in SAMPLES[:2])
    assert norm(("a", "a")) / norm(("a", "b")) == pytest.approx(2 * first / (first + second), rel=1e-3)


def test_a_clipped_token_has_no_gradient() -> None:
    new = torch.tensor([0.5, 0.1, -0.5, -0.1], requires_grad=True)
    losses, clipped = objective.token_losses(
        torch, new, torch.zeros(4), torch.ones(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), Clip(0.2, 0.28)
    )  # fmt: skip
    losses.sum().backward()
    assert new.grad is not None and (new.grad == 0).tolist() == [True, False, True, False]
    assert clipped.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_killed_between_two_updates_it_goes_on_exactly(tmp_path: Path) -> None:
    through, stopped = learner(), learner()
    gains = [1.0, -1.0, 0.5, -0.5, 0.2]
    for one in (through, stopped):
        one.update(prepared(one, gains), Stats())
    for name, content in stopped.policy_files().items():
        (tmp_path / name).write_bytes(content)
    back = learner()
    back.restore(tmp_path, stopped.optimizer_bytes())
    for one in (through, back):
        one.update(prepared(one, gains), Stats())
    assert through.logprobs(SAMPLES) == back.logprobs(SAMPLES)
    engine = Qwen3.load(tmp_path)
    assert engine.logits(SAMPLES[0].ids).shape == (len(SAMPLES[0].ids), 1024)


def test_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(DIRECTORY, tmp_path / "wide")
    config = json.loads((DIRECTORY / "config.json").read_text())
    (tmp_path / "wide" / "config.json").write_text(json.dumps({**config, "hidden_size": 256}))
    with pytest.raises(TrainError, match="hidden_size is 256"):
        Learner(tmp_path / "wide", RULES, 1)


def test_a_broken_gradient_ends_training() -> None:
    one = learner()
    with pytest.raises(TrainError, match=r"train\.learning_rate"):
        one.update(prepared(one, [float("nan")] * 5), Stats())


def test_curves_become_a_png() -> None:
    records = [Record(step=n, heldout=0.1 * n, heldout_low=0.0, heldout_high=1.0, gap_max=1e-6) for n in range(4)]
    drawn = picture([("one", records), ("two", records)], "two runs")
    assert drawn is not None and drawn.startswith(b"\x89PNG")
