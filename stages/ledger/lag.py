"""Staleness: groups whose oldest sampled token lags too far behind the policy, dropped together; what waits for that.

The oldest policy version that sampled any token of any rollout of a group decides. A group with a bound (`max_lag`) is
published as a whole: a graded rollout is held back until nothing of its group is left to do, because a later rollout,
or a newer policy, may still drop all of them. So no index line ever names a row of a group that was over its bound.
"""

from __future__ import annotations

from stages.ledger.book import Book
from stages.ledger.closing import close, end_alone
from stages.ledger.state import Group, Rollout


def held_back(book: Book, group: Group) -> list[Rollout]:
    """The group's graded rollouts that are not published yet, in order; none where the group has no bound."""
    if book.max_lag(group) is None:
        return []
    return [rollout for rollout in _open(book, group) if rollout.graded is not None]


def drop_if_stale(book: Book, group: Group) -> bool:
    """End the whole group as `stale` where it is over its bound; says whether it was."""
    max_lag = book.max_lag(group)
    if max_lag is None:
        return False
    known = [(r.min_policy_version, r.id) for r in _open(book, group) if r.min_policy_version is not None]
    if not known:
        return False
    (oldest, whose), current = min(known), book.state.policy_version
    if current - oldest <= max_lag:
        return False
    message = f"{whose} was sampled by policy version {oldest}, the current one is {current}, max_lag is {max_lag}"
    for rollout in _open(book, group):
        end_alone(book, rollout, "stale", message)
    close(book, group)
    return True


def drop_all_stale(book: Book) -> None:
    """A newer policy is there: what it makes stale is worked on no more."""
    for group in list(book.state.groups.values()):
        drop_if_stale(book, group)


def _open(book: Book, group: Group) -> list[Rollout]:
    return [book.state.rollouts[r] for r in group.rollouts if r in book.state.rollouts]
