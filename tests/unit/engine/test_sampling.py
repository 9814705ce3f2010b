"""Filters against brute force, draws against their distribution, log-probs and ranks against their definitions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.engine.sampling import (
    SamplingParams,
    draw,
    log_softmax,
    new_generator,
    processed_logits,
    token_logprobs,
)


def _rows(count: int, vocab: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, vocab)) * scale).astype(np.float32)


def _probabilities(logits: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(logits.astype(np.float64)))


def _smallest_nucleus(probabilities: np.ndarray, top_p: float) -> set[int]:
    """By trying subsets, smallest first: the fewest tokens that reach top_p, the likeliest of those."""
    tokens = [int(one) for one in np.flatnonzero(probabilities)]
    for size in range(1, len(tokens) + 1):
        best = max(itertools.combinations(tokens, size), key=lambda some: probabilities[list(some)].sum())
        if probabilities[list(best)].sum() >= top_p:
            return set(best)
    return set(tokens)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(2, 9),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_p=st.floats(0.05, 0.995),
    top_k=st.sampled_from([-1, 0, 1, 3, 50]),
    min_p=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
)
def test_filters_match_brute_force(
    seed: int, vocab: int, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    logits = _rows(1, vocab, seed)
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    found = processed_logits(logits, [params])[0]

    probabilities = _probabilities(logits / np.float32(temperature))[0]
    probabilities[probabilities < min_p * probabilities.max() * (1 - 1e-6)] = 0
    if top_k > 0:
        probabilities[np.argsort(-probabilities)[top_k:]] = 0
    probabilities /= probabilities.sum()
    kept = _smallest_nucleus(probabilities, top_p)
    reached = np.sort(probabilities)[::-1].cumsum()
    if np.abs(reached - top_p).min() < 1e-5:
        return  # a sum on the very edge is decided by rounding
    assert set(np.flatnonzero(np.isfinite(found))) == kept
    expected = np.log(probabilities[sorted(kept)] / probabilities[sorted(kept)].sum())
    np.testing.assert_allclose(log_softmax(found)[sorted(kept)], expected, atol=1e-5)


def test_input_is_left_alone() -> None:
    logits = _rows(3, 20)
    before = logits.copy()
    params = [SamplingParams(top_p=0.5), SamplingParams(temperature=0.5), SamplingParams(temperature=0)]
    draw(logits, params, [new_generator(1)] * 3)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(top_k=4), SamplingParams(min_p=0.2)],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = _rows(1, 12, seed=5, scale=1.0)
    count = 20_000
    generator = new_generator(11)
    tokens = [draw(logits, [params], [generator])[0].chosen.token_id for _ in range(count)]
    expected = np.exp(log_softmax(processed_logits(logits, [params])))[0]
    frequency = np.bincount(tokens, minlength=12) / count
    assert np.all(frequency[expected == 0] == 0)
    # Five standard deviations of each count.
    assert np.all(np.abs(frequency - expected) < 5 * np.sqrt(expected * (1 - expected) / count) + 1e-12)


def test_rare_tail_is_reachable() -> None:
    # Each tail token has 3e-8, below float32's resolution at 1; together they have 0.3 %.
    logits = np.full((1, 100_001), np.log(3e-8), dtype=np.float32)
    logits[0, 0] = 0.0
    generator = new_generator(3)
    tail = sum(draw(logits, [SamplingParams()], [generator])[0].chosen.token_id != 0 for _ in range(2000))
    assert 0 < tail < 30


def test_greedy_takes_the_best_and_reports_the_models_own_logprob() -> None:
    logits = _rows(4, 50)
    params = SamplingParams(temperature=0, top_p=0.1, top_k=2, logprobs=0)
    for row, one in enumerate(draw(logits, [params] * 4, [new_generator(0)] * 4)):
        assert one.chosen.token_id == logits[row].argmax()
        assert one.chosen.rank == 1
        assert one.chosen.logprob == pytest.approx(float(log_softmax(logits)[row].max()), abs=1e-6)


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_reported_logprobs_and_ranks(mode: str) -> None:
    logits = _rows(6, 40, seed=2)
    params = SamplingParams(temperature=0.6, top_p=0.8, logprobs=3)
    drawn = draw(logits, [params] * 6, [new_generator(seed) for seed in range(6)], mode)  # type: ignore[arg-type]
    shaped = processed_logits(logits, [params] * 6) if mode == "processed_logprobs" else logits
    expected = log_softmax(shaped)
    for row, one in enumerate(drawn):
        token = one.chosen.token_id
        assert one.chosen.logprob == pytest.approx(float(expected[row, token]), abs=1e-5)
        assert one.chosen.rank == 1 + int((expected[row] > expected[row, token]).sum())
        assert [best.token_id for best in one.best] == list(np.argsort(-expected[row])[:3])
        assert [best.rank for best in one.best] == [1, 2, 3]
        again = token_logprobs(logits[row : row + 1], [token], params, mode)  # type: ignore[arg-type]
        assert one.chosen.logprob == pytest.approx(float(again[0]), abs=1e-5)


def test_greedy_tells_apart_what_rounds_to_one_weight() -> None:
    logits = np.full((1, 70), -90.0, dtype=np.float32)
    logits[0, 5], logits[0, 66] = np.float32(0.0), np.nextafter(np.float32(0.0), np.float32(1.0))
    assert draw(logits, [SamplingParams(temperature=0)], [new_generator(0)])[0].chosen.token_id == 66


@settings(max_examples=50, deadline=None)
@given(vocab=st.sampled_from([1, 2, 63, 64, 65, 128, 259]), seed=st.integers(0, 1000))
def test_draws_stay_in_the_vocabulary_and_in_what_is_kept(vocab: int, seed: int) -> None:
    logits = _rows(3, vocab, seed, scale=30.0)
    params = [SamplingParams(top_p=0.6), SamplingParams(temperature=3.0), SamplingParams(top_k=2)]
    kept = np.isfinite(processed_logits(logits, params))
    for row, one in enumerate(draw(logits, params, [new_generator(seed + row) for row in range(3)])):
        assert 0 <= one.chosen.token_id < vocab
        assert kept[row, one.chosen.token_id]


def test_filtered_tokens_are_reported_as_far_below_and_finite() -> None:
    drawn = draw(_rows(1, 30), [SamplingParams(top_k=2, logprobs=5)], [new_generator(0)])[0]
    assert [one.logprob > -100 for one in drawn.best] == [True, True, False, False, False]
    assert {one.logprob for one in drawn.best[2:]} == {-9999.0}


def test_seed_decides_and_batch_does_not() -> None:
    logits = _rows(8, 300)
    params = [SamplingParams(temperature=0.5 + 0.1 * row, top_p=1.0 if row % 2 else 0.9) for row in range(8)]
    together = draw(logits, params, [new_generator(row) for row in range(8)])
    alone = [draw(logits[row : row + 1], [params[row]], [new_generator(row)])[0] for row in range(8)]
    assert [one.chosen.token_id for one in together] == [one.chosen.token_id for one in alone]


def test_any_integer_is_a_seed_and_none_is_not() -> None:
    assert new_generator(-1).random() == new_generator(2**64 - 1).random()
    assert new_generator(5).random() == new_generator(5).random()
    assert new_generator(None).random() != new_generator(None).random()
