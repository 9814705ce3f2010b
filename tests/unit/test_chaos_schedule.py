"""The chaos schedule: a pure function of its seed that covers every pair of process kind and phase."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice

from tests.chaos import schedule
from tests.support.runs import REPOSITORY


def test_the_same_seed_gives_the_same_schedule_in_another_process() -> None:
    printed = subprocess.run(
        [sys.executable, "-P", "-m", "tests.chaos", "--seed", "7", "--plan", "5"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert json.loads(printed) == [[strike.plain() for strike in run] for run in islice(schedule.runs(7), 5)]


def test_another_seed_gives_another_schedule() -> None:
    assert list(islice(schedule.runs(7), 2)) != list(islice(schedule.runs(8), 2))


def test_every_pair_of_kind_and_phase_is_struck_once_before_any_is_struck_twice() -> None:
    strikes = [strike for run in islice(schedule.runs(3), 9) for strike in run]
    assert len({(strike.kind, strike.phase) for strike in strikes}) == len(schedule.KINDS) * len(schedule.PHASES)


def test_a_run_is_struck_in_the_order_of_positions_which_lie_in_their_phases() -> None:
    for run in islice(schedule.runs(3), 20):
        assert [strike.at for strike in run] == sorted(strike.at for strike in run)
        for strike in run:
            low, high = schedule.PHASES[strike.phase]
            assert low <= strike.at <= high


def test_a_fifth_of_the_strikes_are_double_faults_of_both_sorts_and_all_signals_come() -> None:
    strikes = [strike for run in islice(schedule.runs(0), 250) for strike in run]
    doubles = [strike.second for strike in strikes if strike.second is not None]
    assert 0.17 <= len(doubles) / len(strikes) <= 0.23
    assert {double.moment for double in doubles} == {"together", "restarted"}
    assert {strike.signal for strike in strikes} == set(schedule.SIGNALS)
    for strike in strikes:
        if strike.second is not None:
            assert (strike.second.kind == strike.kind) == (strike.second.moment == "restarted")
