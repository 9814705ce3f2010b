"""The curves of training as a picture: report/train.png, by matplotlib of the extra `train`."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from typing import Any

from workflows.train.records import Record

Line = tuple[str, Callable[[Record], float | None]]
PANELS: tuple[tuple[str, tuple[Line, ...]], ...] = (
    ("success", (("train, mean reward", lambda r: r.reward if r.step else None), ("held out", lambda r: r.heldout))),
    ("sampled tokens a rollout", (("length", lambda r: r.length if r.step else None),)),
    (
        "groups of an update",
        (
            ("asked for", lambda r: r.groups_asked),
            ("learnt from", lambda r: r.groups_kept),
            ("without spread", lambda r: r.groups_flat),
        ),
    ),
    ("versions behind", (("mean", lambda r: r.lag_mean), ("most", lambda r: r.lag_max))),
    ("log-prob gap", (("most", lambda r: r.gap_max or None), ("mean", lambda r: r.gap_mean or None))),
    ("share of tokens clipped", (("clipped", lambda r: r.clip_share),)),
    ("entropy, nats a token", (("entropy", lambda r: r.entropy if r.step else None),)),
    (
        "seconds of an update",
        (
            ("rollouts", lambda r: r.rollout_s if r.step else None),
            ("learning", lambda r: r.train_s if r.step else None),
            ("push", lambda r: r.push_s if r.step else None),
        ),
    ),
    ("sampled tokens a second", (("tokens/s", lambda r: r.tokens_per_s if r.step else None),)),
)
"""Each panel's title and lines; a line leaves out records where it is None."""

LOGARITHMIC = frozenset({"log-prob gap"})


def picture(runs: Sequence[tuple[str, Sequence[Record]]], title: str) -> bytes | None:
    """A PNG with a panel for each group of curves; None where matplotlib is not installed.

    Args:
        runs: a label and its records, each; with one of them the labels are the lines' own.
        title: above all panels.
    """
    try:
        figure_of = importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        return None
    figure = figure_of(figsize=(13, 10), layout="constrained")
    figure.suptitle(title)
    for axes, (name, lines) in zip(figure.subplots(3, 3).flat, PANELS, strict=True):
        _panel(axes, name, lines, runs)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80)
    return buffer.getvalue()


def _panel(axes: Any, name: str, lines: Sequence[Line], runs: Sequence[tuple[str, Sequence[Record]]]) -> None:
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("update", fontsize=8)
    axes.tick_params(labelsize=8)
    for label, records in runs:
        for line, value_of in lines:
            points = [(record.step, value) for record in records if (value := value_of(record)) is not None]
            shown = line if len(runs) == 1 else f"{label}: {line}"
            axes.plot(
                *zip(*points, strict=True), marker="." if len(points) < 30 else "", label=shown
            ) if points else None
        if name == "success":
            _intervals(axes, records)
    if name in LOGARITHMIC and axes.has_data():
        axes.set_yscale("log")
    if axes.has_data():
        axes.legend(fontsize=7)


def _intervals(axes: Any, records: Sequence[Record]) -> None:
    """The 95 % intervals of what was measured."""
    for record in records:
        if record.heldout_low is not None:
            axes.plot([record.step] * 2, [record.heldout_low, record.heldout_high], color="grey", linewidth=1)
