"""Staleness: groups whose oldest sampled token lags too far behind the policy, dropped together; what waits for that.

The oldest policy version that sampled any token of any rollout of a group decides. A group with a bound (`max_lag`) is
published as a whole: a graded rollout is held back until nothing of its group is left to do, because a later rollout,
or a newer policy, may still drop all of them. So no index line ever names a row of a group that was over its bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.ledger import endings
from stages.ledger.state import Group, Rollout

if TYPE_CHECKING:
    from stages.ledger.machine import Ledger


def bound(ledger: Ledger, group: Group) -> int | None:
    """How many policy versions the group may lag behind: its own bound, else the run's; None where there is none."""
    return ledger.state.rules.max_lag if group.max_lag is None else group.max_lag


def held_back(ledger: Ledger, group: Group) -> list[Rollout]:
    """The group's graded rollouts that are not published yet, in order; none where the group has no bound."""
    if bound(ledger, group) is None:
        return []
    return [rollout for rollout in _open(ledger, group) if rollout.graded is not None]


def drop_if_stale(ledger: Ledger, group: Group) -> bool:
    """End the whole group as `stale` where it is over its bound; says whether it was."""
    max_lag = bound(ledger, group)
    if max_lag is None:
        return False
    known = [(r.min_policy_version, r.id) for r in _open(ledger, group) if r.min_policy_version is not None]
    if not known:
        return False
    (oldest, whose), current = min(known), ledger.state.policy_version
    if current - oldest <= max_lag:
        return False
    message = f"{whose} was sampled by policy version {oldest}, the current one is {current}, max_lag is {max_lag}"
    for rollout in _open(ledger, group):
        endings.end_alone(ledger, rollout, "stale", message)
    endings.close(ledger, group)
    return True


def drop_all_stale(ledger: Ledger) -> None:
    """A newer policy is there: what it makes stale is worked on no more."""
    for group in list(ledger.state.groups.values()):
        drop_if_stale(ledger, group)


def _open(ledger: Ledger, group: Group) -> list[Rollout]:
    return [ledger.state.rollouts[r] for r in group.rollouts if r in ledger.state.rollouts]
