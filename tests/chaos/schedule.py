"""What is struck, when and how: a pure function of the seed, so that a run that went wrong can be had again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["router", "replica", "init", "run", "eval", "supervisor"]
Signal = Literal["KILL", "STOP", "TERM"]
Moment = Literal["together", "restarted"]

KINDS: tuple[Kind, ...] = ("router", "replica", "init", "run", "eval", "supervisor")
PHASES: dict[str, tuple[float, float]] = {
    "start": (0.0, 0.0), "early": (0.02, 0.25), "middle": (0.25, 0.6), "late": (0.6, 0.9), "end": (0.9, 0.999),
    "closing": (1.0, 1.0),
}  # fmt: skip
"""Share of the work that the journal shows as committed: 0 before anything is accepted, 1 when all has ended."""
SIGNALS: dict[Signal, float] = {"KILL": 0.6, "STOP": 0.2, "TERM": 0.2}
DOUBLE_SHARE = 0.2
STRIKES_A_RUN = 8
"""Below the supervisor's own limit of restarts, with doubles."""
STOPS_S = (0.3, 1.0, 2.5, 6.0)
"""How long a stopped process stays so; the last is longer than the lease time of a chaos run."""


@dataclass(frozen=True)
class Second:
    """The second half of a double fault: another process at once, or the same kind right after its restart."""

    kind: Kind
    signal: Signal
    moment: Moment
    pause_s: float
    stop_s: float


@dataclass(frozen=True)
class Strike:
    """One fault: `kind` gets `signal` once the journal's position has reached `at`."""

    kind: Kind
    phase: str
    at: float
    signal: Signal
    stop_s: float
    second: Second | None

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def runs(seed: int) -> Iterator[list[Strike]]:
    """The strikes of one run after the other, without end, each run's in the order of their positions.

    Pairs of kind and phase are dealt from a shuffled deck, so that every pair comes before any comes twice.
    """
    draw, deck = random.Random(f"chaos-{seed}"), list[tuple[Kind, str]]()
    while True:
        dealt: list[tuple[Kind, str]] = []
        while len(dealt) < STRIKES_A_RUN:
            if not deck:
                deck = [(kind, phase) for kind in KINDS for phase in PHASES]
                draw.shuffle(deck)
            dealt.append(deck.pop())
        yield sorted((_strike(draw, kind, phase) for kind, phase in dealt), key=lambda strike: strike.at)


def _strike(draw: random.Random, kind: Kind, phase: str) -> Strike:
    low, high = PHASES[phase]
    at, signal, stop_s = round(draw.uniform(low, high), 4), _signal(draw), draw.choice(STOPS_S)
    second = _second(draw, kind) if draw.random() < DOUBLE_SHARE else None
    return Strike(kind, phase, at, signal, stop_s, second)


def _second(draw: random.Random, kind: Kind) -> Second:
    moment: Moment = draw.choice(("together", "restarted"))
    other = kind if moment == "restarted" else draw.choice([k for k in KINDS if k != kind])
    return Second(other, _signal(draw), moment, round(draw.uniform(0.0, 0.6), 3), draw.choice(STOPS_S))


def _signal(draw: random.Random) -> Signal:
    return draw.choices(list(SIGNALS), list(SIGNALS.values()))[0]
