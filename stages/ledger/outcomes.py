"""The failure table: what each outcome of an attempt means for status, mask, reward and retry."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Status = Literal["completed", "failed", "cancelled"]
RewardRule = Literal["verifier", "zero", "none"]


class Outcome(msgspec.Struct, frozen=True):
    """One line of the table. `reward`: the verifier's, 0, or none at all."""

    status: Status
    mask_sample: bool
    reward: RewardRule
    retried: bool
    in_statistics: bool


OK: Final = "ok"
_TRAINABLE_ZERO = Outcome("completed", mask_sample=False, reward="zero", retried=False, in_statistics=True)
_RETRIED_FAULT = Outcome("failed", mask_sample=True, reward="none", retried=True, in_statistics=False)

OUTCOMES: Final[dict[str, Outcome]] = {
    OK: Outcome("completed", mask_sample=False, reward="verifier", retried=False, in_statistics=True),
    "policy_timeout": _TRAINABLE_ZERO,
    "context_length": Outcome("completed", mask_sample=False, reward="verifier", retried=False, in_statistics=True),
    "agent": _TRAINABLE_ZERO,
    "sandbox": _RETRIED_FAULT,
    "llm": _RETRIED_FAULT,
    "verifier": _RETRIED_FAULT,
    "infrastructure": _RETRIED_FAULT,
    "stale": Outcome("failed", mask_sample=True, reward="none", retried=False, in_statistics=False),
    "cancelled": Outcome("cancelled", mask_sample=True, reward="none", retried=False, in_statistics=False),
}

GIVEN_BACK: Final = "given_back"
"""Not a failure: a draining worker hands its lease back unfinished; it costs the rollout no attempt."""

CHECKPOINT: Final = "checkpoint"
"""No end at all: RUN names where the rollout could be taken up, and keeps its lease."""


def is_known(outcome: str) -> bool:
    """Whether a worker may commit this outcome."""
    return outcome in OUTCOMES or outcome in {GIVEN_BACK, CHECKPOINT}


def failure_class(outcome: str) -> str | None:
    """The `failure_class` column: null for a rollout that simply ended."""
    return None if outcome == OK else outcome
