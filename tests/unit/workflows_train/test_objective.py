"""The arithmetic of GRPO and DAPO by NumPy, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from workflows.train import objective
from workflows.train.objective import Clip

CLIP = Clip(0.2, 0.28)


def losses(new: list[float], started: list[float], gains: list[float], weights: float = 1.0) -> tuple[list[float], ...]:
    made = objective.token_losses(
        np, np.array(new), np.array(started), np.full(len(new), weights), np.array(gains), CLIP
    )  # fmt: skip
    return tuple(array.tolist() for array in made)


def test_advantages_are_rewards_less_their_mean_over_their_deviation() -> None:
    assert objective.advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([3**0.5, *[-(3**-0.5)] * 3], rel=1e-5)
    assert objective.advantages([1.0, 1.0]) == [0.0, 0.0]
    assert objective.advantages([]) == []


def test_a_permutation_keeps_the_rewards_and_repeats_itself() -> None:
    rewards = [0.0, 0.25, 0.5, 0.75, 1.0]
    made = {tuple(objective.permuted(rewards, f"seed {number}")) for number in range(20)}
    assert len(made) > 10 and all(sorted(one) == rewards for one in made)
    assert objective.permuted(rewards, "a") == objective.permuted(rewards, "a")


def test_the_overlong_penalty_rises_over_the_tail_alone() -> None:
    assert [objective.overlong_penalty(length, 100, 20) for length in (0, 80, 90, 100, 500)] == [0, 0, -0.5, -1, -1]


@pytest.mark.parametrize("over_tokens", [True, False])
def test_shares_add_up_to_one(over_tokens: bool) -> None:
    lengths = [2, 6, 4]
    shares = objective.token_shares(lengths, ["a", "b", "c"], over_tokens=over_tokens)
    assert math.fsum(share * length for share, length in zip(shares, lengths, strict=True)) == pytest.approx(1)
    assert (len(set(shares)) == 1) is over_tokens


def test_a_rollout_of_two_chains_counts_as_one() -> None:
    shares = objective.token_shares([2, 6, 4], ["a", "a", "b"], over_tokens=False)
    assert shares == pytest.approx([1 / 16, 1 / 16, 1 / 8])


def test_of_a_ratio_beyond_the_bounds_only_the_bound_counts() -> None:
    log = math.log
    values, clipped = losses([log(1.5), log(0.5), log(1.25)], [0.0] * 3, [1.0, -1.0, 1.0])
    assert values == pytest.approx([-1.28, 0.8, -1.25]) and clipped == [1.0, 1.0, 0.0]


def test_a_ratio_that_moved_against_its_advantage_is_never_clipped() -> None:
    values, clipped = losses([math.log(0.5), math.log(1.5)], [0.0, 0.0], [1.0, -1.0])
    assert values == pytest.approx([-0.5, 1.5]) and clipped == [0.0, 0.0]


def test_the_upper_bound_is_its_own() -> None:
    inside = math.log(1.27)
    made = objective.token_losses(
        np, np.array([inside]), np.array([0.0]), np.array([1.0]), np.array([1.0]), Clip(0.2, 0.2)
    )  # fmt: skip
    assert made[1].tolist() == [1.0] and losses([inside], [0.0], [1.0])[1] == [0.0]


def test_a_token_of_an_older_version_weighs_by_how_likely_it_is_now() -> None:
    started, recorded = np.log([0.5, 0.5, 0.1, 0.9]), np.log([0.5, 0.25, 0.2, 0.1])
    assert objective.lag_weights(np, started, recorded, 2.0).tolist() == pytest.approx([1.0, 2.0, 0.5, 2.0])
    assert losses([0.0], [0.0], [1.0], weights=0.5)[0] == pytest.approx([-0.5])


def test_the_distance_is_zero_where_policies_agree_and_positive_elsewhere() -> None:
    made = objective.kl_estimates(np, np.log([0.5, 0.5, 0.1]), np.log([0.5, 0.4, 0.3])).tolist()
    assert made[0] == 0 and made[1] == pytest.approx(0.8 - math.log(0.8) - 1) and made[2] > 0
