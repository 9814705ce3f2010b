"""The newest checkpoint of each open rollout: kept while it may be gone on from, and its segment with it."""

from __future__ import annotations

from stages.ledger.book import Book
from stages.ledger.effects import Finished
from stages.ledger.state import Rollout
from stages.trajectory import CheckpointRange


def keep(book: Book, rollout: Rollout, checkpoint: CheckpointRange) -> None:
    """Take in a checkpoint of the rollout's present attempt; one that says less than what is kept came twice."""
    if rollout.checkpoint is not None:
        if (rollout.attempt, checkpoint.tokens) <= (rollout.checkpoint_attempt, rollout.checkpoint.tokens):
            return
        drop(book, rollout)
    rollout.checkpoint, rollout.checkpoint_attempt = checkpoint, rollout.attempt
    book.state.segments[checkpoint.path] += 1
    book.state.counts.checkpoints += 1


def drop(book: Book, rollout: Rollout) -> None:
    """The rollout goes on from here no more."""
    if rollout.checkpoint is not None:
        release(book, rollout.checkpoint.path)
        rollout.checkpoint = None


def waste(book: Book, rollout: Rollout) -> None:
    """Drop the checkpoint with what was sampled up to it: the rollout starts anew."""
    if rollout.checkpoint is not None:
        book.state.counts.wasted_tokens += rollout.checkpoint.tokens
        drop(book, rollout)


def waste_if_stale(book: Book, rollout: Rollout) -> None:
    """Going on from tokens that are over the group's lag bound already would only end as `stale`."""
    if rollout.checkpoint is None:
        return
    max_lag = book.max_lag(book.state.groups[rollout.group])
    oldest = rollout.checkpoint.min_policy_version
    if max_lag is not None and oldest is not None and book.state.policy_version - oldest > max_lag:
        waste(book, rollout)


def release(book: Book, segment: str) -> None:
    """One record less is needed of a segment; without any it is finished."""
    segments = book.state.segments
    segments[segment] -= 1
    if segments[segment] == 0:
        del segments[segment]
        book.effects.append(Finished(segment))
