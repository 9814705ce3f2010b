"""What people see of a run while it goes on and when it ends: a live display, or plain lines without a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch.figures import STAGES, Pace, Snapshot, duration, line, seconds_left, snapshot

_LINE_EVERY_S = 5.0


class Progress:
    """Shows status documents as they come; a context manager that leaves the terminal as it was.

    Args:
        stream: where to write; None is standard error.
        run_dir: shown above the figures.
        clock: seconds that only rise; tests pass their own.
    """

    def __init__(
        self, run_dir: Path | str = "", *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = Console(file=stream, stderr=stream is None, highlight=False)
        self._run_dir = str(run_dir)
        self._clock = clock
        self._began_s = clock()
        self._pace, self._token_pace = Pace(), Pace()
        self._live: Live | None = None
        self._said: tuple[float, str] | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
            self._live = None

    def update(self, status: Mapping[str, Any]) -> None:
        """Show a status document (the shape of `status --json`; a rate that it does not give is measured)."""
        now_s, now = self._clock(), snapshot(status)
        self._pace.add(now_s, now.ended)
        self._token_pace.add(now_s, now.tokens)
        per_s = now.rollouts_per_s if now.rollouts_per_s is not None else self._pace.per_s
        if self._live is not None:
            self._live.update(self._picture(now, per_s, now_s - self._began_s), refresh=True)
        elif self._due(now_s, now.state):
            self._said = (now_s, now.state)
            self._console.print(line(now, per_s), soft_wrap=True, markup=False)

    def say(self, text: str) -> None:
        """A line that stays, above the live figures: a process that was started again, a warning."""
        self._console.print(text, soft_wrap=True, markup=False)

    def _due(self, now_s: float, state: str) -> bool:
        return self._said is None or self._said[1] != state or now_s - self._said[0] >= _LINE_EVERY_S

    def _picture(self, now: Snapshot, per_s: float | None, elapsed_s: float) -> RenderableType:
        head = Text(f"{now.state}  {self._run_dir}", style="bold")
        bar = Table.grid()  # a bar alone ends without a new line
        bar.add_row(ProgressBar(total=max(1, now.accepted), completed=now.ended, width=60))
        reward = "none yet" if now.reward_mean is None else f"{now.reward_mean:.3f}"
        pace = "unknown" if per_s is None else f"{per_s:.1f} rollouts/s"
        tokens_per_s = now.tokens_per_s if now.tokens_per_s is not None else self._token_pace.per_s
        tokens = f", {tokens_per_s:.0f} tokens/s" if tokens_per_s else ""
        figures = [
            f"{now.ended} of {now.accepted}: {now.completed} completed, {now.failed} failed, {now.cancelled} cancelled",
            f"mean reward so far {reward}",
            f"{pace}{tokens}; {duration(elapsed_s)} gone, {duration(seconds_left(now, per_s))} left",
            f"fleet: {now.replicas_ok} of {now.replicas} replicas, {now.sessions} sessions",
        ]
        parts: list[RenderableType] = [head, bar, *(Text(text) for text in figures), _stage_table(now)]
        if now.stuck:
            parts.append(Text(f"stuck: {now.stuck}", style="red"))
        return Group(*parts)


def _stage_table(now: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    table.add_column("queued", justify="right")
    table.add_column("leased", justify="right")
    for stage in STAGES:
        table.add_row(stage, str(now.queued[stage]), str(now.leased[stage]))
    return table


def summary_table(summary: Mapping[str, Any], run_dir: Path | str) -> Table:
    """The end of a run as a table: counts, mean reward, rates, wall time, where the shards are.

    `summary` is report/summary.json; what it does not hold is left out.
    """
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column("what", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold")
    for name, value in summary_rows(summary, run_dir):
        table.add_row(name, Text(value))
    return table


def summary_rows(summary: Mapping[str, Any], run_dir: Path | str) -> list[tuple[str, str]]:
    """The rows of `summary_table`, as text."""
    now = snapshot(summary)
    rows = [
        ("state", now.state),
        ("rollouts", f"{now.completed} completed, {now.failed} failed, {now.cancelled} cancelled of {now.accepted}"),
    ]
    if now.reward_mean is not None:
        rows.append(("mean reward", f"{now.reward_mean:.4f}"))
    if now.rollouts_per_s is not None:
        rows.append(("rollouts/s", f"{now.rollouts_per_s:.1f}"))
    if now.tokens_per_s is not None:
        rows.append(("tokens/s", f"{now.tokens_per_s:.0f}"))
    timings = summary.get("timings")
    if isinstance(timings, Mapping) and isinstance(timings.get("wall_s"), (int, float)):
        rows.append(("wall time", duration(float(timings["wall_s"]))))
    failures = summary.get("failures")
    if isinstance(failures, Mapping) and failures:
        rows.append(("failures", ", ".join(f"{name} {count}" for name, count in failures.items())))
    rows.append(("shards", str(Path(run_dir) / "shards")))
    rows.append(("index", str(Path(run_dir) / "index")))
    return rows


def print_summary(summary: Mapping[str, Any], run_dir: Path | str, *, stream: TextIO | None = None) -> None:
    """Print the end of a run to standard output (or `stream`)."""
    Console(file=stream, highlight=False, soft_wrap=True).print(summary_table(summary, run_dir))


def print_points(points: Sequence[tuple[str, str, int]], *, stream: TextIO | None = None) -> None:
    """Print a sweep's points: what was set, where it lies, its exit code."""
    table = Table(box=None, pad_edge=False)
    for name in ("point", "run directory", "exit code"):
        table.add_column(name, overflow="fold")
    for label, run_dir, code in points:
        table.add_row(Text(label), Text(run_dir), str(code))
    Console(file=stream, highlight=False).print(table)
