"""Continuous batching: results that depend on nothing but the request, exact counters, preemption, abort, bounds."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.engine.errors import EngineError
from stages.engine.qwen3 import Qwen3
from stages.engine.sampling import SamplingParams, token_logprobs
from stages.engine.scheduler import Scheduler, SchedulerOptions
from stages.engine.sequence import Sequence

OPTIONS = SchedulerOptions(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, kv_cache_tokens=4096)


def _options(**changes: object) -> SchedulerOptions:
    return msgspec.structs.replace(OPTIONS, **changes)


def _prompt(count: int, seed: int = 0) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(3, 259, count)]


def _sequence(prompt: list[int], seed: int = 1, tokens: int = 24, **sampling: object) -> Sequence:
    params = SamplingParams(seed=seed, max_tokens=tokens, ignore_eos=True, logprobs=0)
    return Sequence(prompt=prompt, params=msgspec.structs.replace(params, **sampling), limit=tokens)


def _run(scheduler: Scheduler, *sequences: Sequence) -> list[list[int]]:
    for one in sequences:
        scheduler.add(one)
    for _ in range(10_000):
        if not scheduler.busy:
            return [one.tokens[len(one.prompt) :] for one in sequences]
        scheduler.step()
    raise AssertionError("the scheduler does not come to an end")


def _mixed(count: int) -> list[Sequence]:
    shapes = [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}, {"top_k": 5}]
    return [
        _sequence(_prompt(7 + 19 * (row % 5), seed=row), seed=row, tokens=6 + 7 * (row % 4), **shapes[row % 4])
        for row in range(count)
    ]


def test_a_request_gives_the_same_tokens_alone_and_in_a_crowd(model: Qwen3) -> None:
    alone = [_run(Scheduler(model, OPTIONS), one)[0] for one in _mixed(20)]
    together = _run(Scheduler(model, OPTIONS), *_mixed(20))
    assert together == alone


@pytest.mark.parametrize("shape", [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 20}])
def test_logprobs_are_those_of_a_plain_forward_pass(model: Qwen3, shape: dict[str, object]) -> None:
    sequences = [_sequence(_prompt(40 + row, seed=row), seed=row, tokens=60, **shape) for row in range(6)]
    _run(Scheduler(model, OPTIONS), *sequences)
    for one in sequences:
        start = len(one.prompt)
        logits = model.logits(one.tokens)[start - 1 : -1]
        again = token_logprobs(logits, one.tokens[start:], one.params)
        np.testing.assert_allclose([drawn.chosen.logprob for drawn in one.drawn], again, atol=1e-4)


def test_prefix_cache_changes_nothing_but_the_work(model: Qwen3) -> None:
    def turns(scheduler: Scheduler) -> list[list[int]]:
        stream, answers = _prompt(50), []
        for turn in range(4):
            answers += _run(scheduler, _sequence(list(stream), seed=turn, tokens=20))
            stream += [*answers[-1], *_prompt(9, seed=turn)]
        return answers

    with_cache, without = Scheduler(model, OPTIONS), Scheduler(model, _options(enable_prefix_caching=False))
    assert turns(with_cache) == turns(without)
    # Prompts of 50, 79, 108, 137 tokens; 69, 98, 127 of which were stored when the next came: 4, 6, 7 blocks of 16.
    assert with_cache.counters.prefix_cache_queries == 50 + 79 + 108 + 137
    assert with_cache.counters.prefix_cache_hits == 16 * (4 + 6 + 7)
    assert without.counters.prefix_cache_hits == 0
    assert with_cache.kv_usage == 0.0


def test_a_wholly_cached_prompt_still_computes_its_last_token(model: Qwen3) -> None:
    scheduler = Scheduler(model, OPTIONS)
    first, second = _sequence(_prompt(32)), _sequence(_prompt(32))
    assert _run(scheduler, first) == _run(scheduler, second)
    assert (first.cached_tokens, second.cached_tokens) == (0, 16)


def test_salt_keeps_caches_apart(model: Qwen3) -> None:
    scheduler = Scheduler(model, OPTIONS)
    _run(scheduler, replace(_sequence(_prompt(40)), salt="a"))
    other, same = replace(_sequence(_prompt(40)), salt="b"), replace(_sequence(_prompt(40)), salt="a")
    _run(scheduler, other, same)
    assert (other.cached_tokens, same.cached_tokens) == (0, 32)


def test_running_out_of_blocks_preempts_and_changes_no_token(model: Qwen3) -> None:
    roomy = Scheduler(model, OPTIONS)
    narrow = Scheduler(model, _options(kv_cache_tokens=256, enable_prefix_caching=False))

    def sequences() -> list[Sequence]:
        return [_sequence(_prompt(30, seed=row), seed=row, tokens=60) for row in range(6)]

    assert _run(narrow, *sequences()) == _run(roomy, *sequences())
    assert narrow.counters.preemptions > 0
    assert roomy.counters.preemptions == 0
    assert narrow.counters.generation_tokens == 6 * 60
    assert narrow.counters.prefix_cache_queries == 6 * 30  # being computed again is no new query
    assert narrow.kv_usage == 0.0


@pytest.mark.parametrize("caching", [True, False])
def test_the_last_to_come_gives_way_and_stays_out_for_that_step(model: Qwen3, caching: bool) -> None:
    options = _options(kv_cache_tokens=256, max_num_batched_tokens=32, enable_prefix_caching=caching)
    scheduler = Scheduler(model, options)
    first, second = (_sequence(_prompt(100, seed=row), tokens=150) for row in range(2))
    scheduler.add(first)
    scheduler.add(second)
    while not scheduler.counters.preemptions:
        scheduler.step()
    assert (first.row, second.row, second.blocks) == (0, -1, [])
    assert (scheduler.running, scheduler.waiting) == (1, 1)


def test_a_long_prompt_does_not_hold_up_who_decodes(model: Qwen3) -> None:
    scheduler = Scheduler(model, _options(max_num_batched_tokens=16))
    short, long = _sequence(_prompt(5), tokens=50), _sequence(_prompt(200, seed=2), tokens=5)
    scheduler.add(short)
    scheduler.step()
    scheduler.add(long)
    for step in range(2, 12):
        scheduler.step()
        assert len(short.drawn) == step
        assert long.computed == 15 * (step - 1)
    assert not long.drawn


def test_no_more_run_than_allowed(model: Qwen3) -> None:
    scheduler = Scheduler(model, _options(max_num_seqs=3))
    for row in range(7):
        scheduler.add(_sequence(_prompt(4, seed=row), tokens=3 + row))
    most = 0
    while scheduler.busy:
        scheduler.step()
        most = max(most, scheduler.running)
    assert most == 3


@pytest.mark.parametrize("steps", [0, 1, 5], ids=["waiting", "prefilling", "decoding"])
def test_abort_frees_everything_and_disturbs_nobody(model: Qwen3, steps: int) -> None:
    scheduler = Scheduler(model, _options(max_num_batched_tokens=32))
    victim, other = _sequence(_prompt(70), tokens=30), _sequence(_prompt(20, seed=9), seed=9, tokens=30)
    scheduler.add(victim)
    scheduler.add(other)
    for _ in range(steps):
        scheduler.step()
    assert scheduler.abort(victim)
    assert victim.finish_reason == "abort"
    assert not scheduler.abort(victim)
    while scheduler.busy:
        scheduler.step()
    assert other.tokens[20:] == _run(Scheduler(model, OPTIONS), _sequence(_prompt(20, seed=9), seed=9, tokens=30))[0]
    assert scheduler.kv_usage == 0.0


def test_what_ends_an_answer(model: Qwen3) -> None:
    answer = _run(Scheduler(model, OPTIONS), _sequence(_prompt(10), tokens=12))[0]
    by_id = _sequence(_prompt(10), tokens=12, stop_token_ids=(answer[4],))
    _run(Scheduler(model, OPTIONS), by_id)
    end = answer.index(answer[4]) + 1
    assert (by_id.tokens[10:], by_id.finish_reason, by_id.stop_reason) == (answer[:end], "stop", answer[4])
    by_eos = _sequence(_prompt(10), tokens=12, ignore_eos=False)
    _run(Scheduler(model, OPTIONS, frozenset({answer[6]})), by_eos)
    end = answer.index(answer[6]) + 1
    assert (by_eos.tokens[10:], by_eos.finish_reason, by_eos.stop_reason) == (answer[:end], "stop", None)
    by_length = _sequence(_prompt(10), tokens=3)
    _run(Scheduler(model, OPTIONS), by_length)
    assert (by_length.tokens[10:], by_length.finish_reason) == (answer[:3], "length")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 60), st.integers(1, 40), st.integers(-1, 30)),
        min_size=1,
        max_size=10,
    ),
    st.sampled_from([128, 256, 2048]),
    st.sampled_from([1, 7, 64]),
)
def test_random_arrivals_and_aborts_change_no_answer(
    model: Qwen3, arrivals: list[tuple[int, int, int, int]], kv_tokens: int, budget: int
) -> None:
    options = _options(
        max_model_len=128, kv_cache_tokens=kv_tokens, max_num_batched_tokens=budget, max_num_seqs=3, block_size=8
    )
    scheduler = Scheduler(model, options)
    sequences = [_sequence(_prompt(size, seed=size % 3), seed=size, tokens=tokens) for _, size, tokens, _ in arrivals]
    step = 0
    while step <= 6 or scheduler.busy:
        for (arrival, _, _, abort_after), one in zip(arrivals, sequences, strict=True):
            if arrival == step:
                scheduler.add(one)
            if abort_after >= 0 and arrival + abort_after == step:
                scheduler.abort(one)
        if scheduler.busy:
            scheduler.step()
        step += 1
        assert step < 5_000
    assert scheduler.kv_usage == 0.0
    for one in sequences:
        plain = _run(Scheduler(model, OPTIONS), _sequence(one.prompt, seed=len(one.prompt), tokens=one.limit))[0]
        answer = one.tokens[len(one.prompt) :]
        assert answer == plain[: len(answer)]
        assert one.finish_reason == "abort" or answer == plain


def test_unusable_bounds_are_refused(model: Qwen3) -> None:
    for options, word in (
        (_options(max_model_len=4096), "max_model_len=4096"),
        (_options(kv_cache_tokens=200), "kv_cache_tokens=200"),
        (_options(max_num_seqs=0), "max_num_seqs=0"),
    ):
        with pytest.raises(EngineError, match=word):
            Scheduler(model, options)
    with pytest.raises(EngineError, match="too long"):
        Scheduler(model, OPTIONS).add(_sequence(_prompt(256)))
