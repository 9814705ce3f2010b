"""From chains to samples: places, versions, advantages, and what encoding again does to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from stages.chat import ChatTokenizer
from tests.support.runs import REPOSITORY
from workflows.errors import TrainError
from workflows.train import samples as data
from workflows.train.samples import Group, Rollout, Sample, Shaping

CHAIN: dict[str, Any] = {
    "token_ids": [5, 6, 7, 8, 9, 10],
    "loss_mask": [0, 0, 1, 1, 0, 1],
    "logprobs": [0.0, 0.0, -0.1, -0.2, 0.0, -0.3],
    "policy_versions": [{"version": 3, "start": 2, "end": 4}, {"version": 4, "start": 5, "end": 6}],
}
SAMPLE = data.from_chain(CHAIN)


def group(*rewards: float, length: int = 3) -> Group:
    one = replace(SAMPLE, places=[*range(1, length + 1)], ids=[0] * (length + 1))
    return Group("g", tuple(Rollout(f"g-{n}", reward, (one,)) for n, reward in enumerate(rewards)))


def test_a_chain_gives_its_sampled_tokens_with_the_version_that_drew_each() -> None:
    assert Sample([5, 6, 7, 8, 9, 10], [2, 3, 5], [-0.1, -0.2, -0.3], [3, 3, 4]) == SAMPLE
    assert SAMPLE.oldest == 3 and data.lags([SAMPLE], 5) == [2]


def test_a_sampled_token_without_a_version_is_refused() -> None:
    with pytest.raises(TrainError, match="token at 5"):
        data.from_chain({**CHAIN, "policy_versions": CHAIN["policy_versions"][:1]})
    with pytest.raises(TrainError, match="names no policy version: use a fleet with token routes"):
        data.from_chain({**CHAIN, "policy_versions": []})


def test_masked_rollouts_are_no_part_of_a_group() -> None:
    lines = [
        SimpleNamespace(rollout_id=f"r{n}", mask_sample=n == 1, reward=None if n == 1 else float(n)) for n in range(3)
    ]
    found = data.group_of("g", [SimpleNamespace(line=line, chains=(CHAIN,)) for line in lines])
    assert [one.rollout_id for one in found.rollouts] == ["r0", "r2"] and found.masked == 1
    assert found.has_spread and not group(1.0, 1.0).has_spread


def test_all_samples_of_a_group_get_its_advantages() -> None:
    gains = [sample.gain for sample in data.with_gains([group(0.0, 1.0), group(1.0, 1.0)], Shaping())]
    assert gains == pytest.approx([-1, 1, 0, 0], abs=1e-4)


def test_a_rollout_of_two_chains_gives_both_its_advantage() -> None:
    two = Group("g", (Rollout("a", 1.0, (SAMPLE, SAMPLE)), Rollout("b", 0.0, (SAMPLE,))))
    made = data.with_gains([two], Shaping())
    assert [(sample.gain > 0, sample.rollout) for sample in made] == [(True, "a"), (True, "a"), (False, "b")]


def test_shaping_lowers_what_is_too_long() -> None:
    long, short = group(1.0, length=40).rollouts[0], group(1.0, length=4).rollouts[0]
    mixed = Group("g", (long, short))
    assert [sample.gain for sample in data.with_gains([mixed], Shaping())] == [0, 0]
    assert [sample.gain > 0 for sample in data.with_gains([mixed], Shaping(overlong=40, overlong_tail=8))] == [
        False,
        True,
    ]


def test_permuted_rewards_are_those_of_the_group_in_another_order() -> None:
    groups = [replace(group(1.0, 0.0, 0.0, 0.0), group_id=f"g{n}") for n in range(40)]
    made = data.with_gains(groups, Shaping(permuted=True, seed=1))
    firsts = [sample.gain > 0 for sample in made[::4]]
    assert 0 < sum(firsts) < 25 and sum(sample.gain > 0 for sample in made) == 40
    assert made == data.with_gains(groups, Shaping(permuted=True, seed=1))


def pairs(text: str) -> list[int]:
    """Encodes two letters as one token where it can: 'ab' is 12, while 1 and 2 are 'a' and 'b'."""
    return [int(part) for part in text.replace("ab", " 12 ").replace("c", " 3 ").replace("a", " 1 ").split()]


def letters(ids: Sequence[int]) -> str:
    return "".join({1: "a", 2: "b", 3: "c", 12: "ab"}[one] for one in ids)


def test_encoding_again_changes_or_breaks_what_was_sampled_otherwise() -> None:
    same = Sample([9, 12, 3], [1, 2], [-1.0, -2.0], [0, 0])
    split = Sample([9, 1, 2, 3], [1, 2, 3], [-1.0, -1.0, -2.0], [0, 0, 0])
    kept, count = data.reencoded([same, split], letters, pairs)
    assert kept == [same] and (count.samples, count.changed, count.broken) == (2, 1, 1)


def test_the_tiny_policys_own_turns_are_read_as_runs_of_tokens() -> None:
    chat = ChatTokenizer.load(REPOSITORY / "workflows" / "policies" / "tiny")
    word = chat.encode("The answer is 12.")
    apart = [token for letter in "12." for token in chat.encode(letter)]
    ids = [*chat.encode("question"), *word, 1, *apart]
    start = len(ids) - len(apart)
    one = Sample(ids, [*range(len(ids) - len(apart) - 1 - len(word), start - 1), *range(start, len(ids))], [], [])
    assert data.runs(one.places) == [(start - 1 - len(word), start - 1), (start, len(ids))]
    assert chat.decode(word) == "The answer is 12."
    assert data.reencoded([one], chat.decode, chat.encode)[1].samples == 1
