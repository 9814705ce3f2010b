"""The progress display: what it says with and without a terminal, and the table at the end."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.figures import Pace, duration, line, seconds_left, snapshot
from launch.progress import Progress, print_points, print_summary, summary_rows

STATUS: dict[str, Any] = {
    "run_id": "r",
    "state": "running",
    "stages": {
        "init": {"queued": 1, "leased": 2},
        "run": {"queued": 30, "leased": 32},
        "eval": {"queued": 0, "leased": 5},
    },
    "rollouts": {"accepted": 256, "completed": 180, "failed": 4, "cancelled": 2, "open": 70},
    "reward": {"mean": 0.9123, "n": 180},
    "tokens": 20_000,
    "fleet": [{"id": "a", "state": "ready", "sessions": 30}, {"id": "b", "state": "down", "sessions": 0}],
    "stuck": None,
}


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def status(completed: int, state: str = "running", tokens: int = 0) -> dict[str, Any]:
    return {"state": state, "rollouts": {"accepted": 100, "completed": completed}, "tokens": tokens}


def test_a_snapshot_reads_a_whole_status() -> None:
    now = snapshot(STATUS)
    assert (now.ended, now.accepted, now.reward_mean, now.replicas_ok, now.replicas, now.sessions) == (
        186, 256, 0.9123, 1, 2, 30,
    )  # fmt: skip
    assert (now.queued["run"], now.leased["eval"]) == (30, 5)


@pytest.mark.parametrize("broken", [{}, {"stages": None, "rollouts": [], "fleet": None, "reward": 3, "state": None}])
def test_a_status_that_says_nothing_counts_as_nothing(broken: dict[str, Any]) -> None:
    now = snapshot(broken)
    assert (now.ended, now.accepted, now.reward_mean, now.share, now.state) == (0, 0, None, 0.0, "starting")


def test_the_pace_is_that_of_the_last_seconds() -> None:
    pace = Pace(window_s=10.0)
    assert pace.per_s is None
    for second in range(30):
        pace.add(float(second), 0 if second < 10 else (second - 10) * 4)
    assert pace.per_s == pytest.approx(4.0)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 10**6)), max_size=30))
def test_the_pace_never_fails_and_is_not_negative_for_rising_counts(points: list[tuple[float, int]]) -> None:
    pace = Pace()
    for now_s, count in zip(sorted(p[0] for p in points), sorted(p[1] for p in points), strict=True):
        pace.add(now_s, count)
    assert pace.per_s is None or pace.per_s >= 0


def test_time_left() -> None:
    assert seconds_left(snapshot(status(60)), 4.0) == 10.0
    assert seconds_left(snapshot(status(60)), 0.0) is None
    assert seconds_left(snapshot(status(100)), None) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "unknown"), (7.6, "8 s"), (125.0, "2 min 05 s"), (3780.0, "1 h 03 min"), (59.7, "1 min 00 s")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_line_says_where_everything_is() -> None:
    assert line(snapshot(STATUS), 10.0) == (
        "running: 186/256 ended, queued+leased init 1+2 run 30+32 eval 0+5, failed 4 cancelled 2, "
        "mean reward 0.912, 10.0 rollouts/s, left 7 s"
    )


def test_without_a_terminal_a_line_every_few_seconds_and_at_each_change() -> None:
    clock, out = Clock(), io.StringIO()
    with Progress("runs/x", stream=out, clock=clock) as progress:
        for second in range(12):
            clock.now_s = 100.0 + second
            progress.update(status(second * 2))
        progress.update(status(24, "draining"))
        progress.say("replica-1 was started again")
    lines = out.getvalue().splitlines()
    assert [text.partition(",")[0] for text in lines] == [
        "running: 0/100 ended",
        "running: 10/100 ended",
        "running: 20/100 ended",
        "draining: 24/100 ended",
        "replica-1 was started again",
    ]
    assert "2.0 rollouts/s" in lines[1]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_figures_stay_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clock, out = Clock(), Terminal()
    with Progress("runs/x", stream=out, clock=clock) as progress:
        progress.update({**STATUS, "stuck": "no replica is ready"})
        clock.now_s += 2.0
        progress.update({**STATUS, "tokens": 24_000})
    text = out.getvalue()
    assert "\x1b[" in text
    for part in (
        "186 of 256: 180 completed",
        "mean reward so far 0.912",
        "2000 tokens/s",
        "1 of 2 replicas",
        "stuck: no replica",
    ):
        assert part in text


def test_the_end_as_a_table() -> None:
    summary = {
        **STATUS,
        "state": "completed",
        "rates": {"rollouts_per_s": 21.26, "tokens_per_s": 1840.2},
        "timings": {"wall_s": 12.0},
        "failures": {"sandbox": 4},
    }
    assert summary_rows(summary, "/runs/x") == [
        ("state", "completed"),
        ("rollouts", "180 completed, 4 failed, 2 cancelled of 256"),
        ("mean reward", "0.9123"),
        ("rollouts/s", "21.3"),
        ("tokens/s", "1840"),
        ("wall time", "12 s"),
        ("failures", "sandbox 4"),
        ("shards", "/runs/x/shards"),
        ("index", "/runs/x/index"),
    ]
    out = io.StringIO()
    print_summary(summary, "/runs/x[red]", stream=out)
    assert "/runs/x[red]/shards" in out.getvalue()


def test_the_points_of_a_sweep_as_a_table() -> None:
    out = io.StringIO()
    print_points([("seed=1", "/runs/s/0", 0), ("seed=2", "/runs/s/1", 1)], stream=out)
    assert [text.split() for text in out.getvalue().splitlines()[1:]] == [
        ["seed=1", "/runs/s/0", "0"],
        ["seed=2", "/runs/s/1", "1"],
    ]
