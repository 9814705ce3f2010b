"""The newest checkpoint of each open rollout: kept while it may be gone on from, and its segment with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.ledger import lag
from stages.ledger.effects import Finished
from stages.ledger.state import Rollout
from stages.trajectory import CheckpointRange

if TYPE_CHECKING:
    from stages.ledger.machine import Ledger


def keep(ledger: Ledger, rollout: Rollout, checkpoint: CheckpointRange) -> None:
    """Take in a checkpoint of the rollout's present attempt; one that says less than what is kept came twice."""
    if rollout.checkpoint is not None:
        if (rollout.attempt, checkpoint.tokens) <= (rollout.checkpoint_attempt, rollout.checkpoint.tokens):
            return
        drop(ledger, rollout)
    rollout.checkpoint, rollout.checkpoint_attempt = checkpoint, rollout.attempt
    ledger.state.segments[checkpoint.path] += 1
    ledger.state.counts.checkpoints += 1


def drop(ledger: Ledger, rollout: Rollout) -> None:
    """The rollout goes on from here no more."""
    if rollout.checkpoint is not None:
        release(ledger, rollout.checkpoint.path)
        rollout.checkpoint = None


def waste(ledger: Ledger, rollout: Rollout) -> None:
    """Drop the checkpoint with what was sampled up to it: the rollout starts anew."""
    if rollout.checkpoint is not None:
        ledger.state.counts.wasted_tokens += rollout.checkpoint.tokens
        drop(ledger, rollout)


def waste_if_stale(ledger: Ledger, rollout: Rollout) -> None:
    """Going on from tokens that are over the group's lag bound already would only end as `stale`."""
    if rollout.checkpoint is None:
        return
    max_lag = lag.bound(ledger, ledger.state.groups[rollout.group])
    oldest = rollout.checkpoint.min_policy_version
    if max_lag is not None and oldest is not None and ledger.state.policy_version - oldest > max_lag:
        waste(ledger, rollout)


def release(ledger: Ledger, segment: str) -> None:
    """One record less is needed of a segment; without any it is finished."""
    segments = ledger.state.segments
    segments[segment] -= 1
    if segments[segment] == 0:
        del segments[segment]
        ledger.effects.append(Finished(segment))
