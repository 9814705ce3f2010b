"""How rollouts end and what follows for their groups: closed, held back, or cancelled with enough in hand."""

from __future__ import annotations

from stages.ledger import lag
from stages.ledger.book import Book
from stages.ledger.closing import close, end_alone
from stages.ledger.events import CommitItem
from stages.ledger.outcomes import OUTCOMES
from stages.ledger.state import Closing, Group, Rollout


def end(book: Book, rollout: Rollout, outcome: str, message: str, item: CommitItem | None = None) -> None:
    """The rollout's one terminal entry; closes its group when it was the last."""
    group = book.state.groups[rollout.group]
    end_alone(book, rollout, outcome, message, item)
    settle(book, group)


def settle(book: Book, group: Group) -> None:
    """Close the group where nothing of it is left to do, or where it has enough.

    What a group with a lag bound holds back counts as done: it is published here, all at once.
    """
    held = lag.held_back(book, group)
    if len(held) == group.open:
        for rollout in held:
            end_alone(book, rollout, rollout.outcome, rollout.message, rollout.graded)
        close(book, group)
        return
    usable = group.usable + sum(OUTCOMES[rollout.outcome].in_statistics for rollout in held)
    if group.min_usable is not None and usable >= group.min_usable:
        cancel_open(book, group, "min_usable", f"the group has its {group.min_usable} usable rollouts")


def cancel_open(book: Book, group: Group, closing: Closing, reason: str) -> int:
    """Close a group now: what it holds back is published, what is still open ends as cancelled; returns how many.

    `closing` becomes the group line's closed_by.
    """
    group.closing = closing
    still_open = [book.state.rollouts[r] for r in group.rollouts if r in book.state.rollouts]
    for rollout in still_open:
        if rollout.graded is not None:
            end_alone(book, rollout, rollout.outcome, rollout.message, rollout.graded)
        else:
            end_alone(book, rollout, "cancelled", reason)
    close(book, group)
    return sum(rollout.graded is None for rollout in still_open)
