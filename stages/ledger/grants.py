"""Which queued work a member that asks is given: a pure choice; the Leased event then makes it so."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from stages.ledger.machine import Ledger
from stages.ledger.state import EVAL, INIT, RUN

LOOK_AHEAD: Final = 32
"""How far past the head of the queue a rollout with a warm layer is looked for."""


def choose(ledger: Ledger, stage: str, free: int, warm: Collection[str] = ()) -> list[str]:
    """Up to `free` pieces of work of a stage, most urgent first; nothing while the run drains (but EVAL goes on).

    `warm` are layer digests that the member has unpacked already: among equals they go first, behind the head of the
    queue, which is always served so that no rollout starves for being cold.
    """
    if free <= 0 or (ledger.state.draining and stage != EVAL):
        return []
    if stage == INIT:
        return _environments(ledger, free)
    queue = ledger.queues.by_stage[stage]
    if not warm or len(queue) <= free:
        return list(queue.first(free))
    candidates = list(queue.first(free + LOOK_AHEAD))
    head, rest = candidates[:1], candidates[1:]
    top = _priority(ledger, head[0])
    rest.sort(key=lambda r: (-_priority(ledger, r), _priority(ledger, r) == top and not _is_warm(ledger, r, warm)))
    return (head + rest)[:free]


def _environments(ledger: Ledger, free: int) -> list[str]:
    """INIT stops ahead of a full ready buffer: what waits behind environments being prepared counts as prepared."""
    state, queues = ledger.state, ledger.queues
    room = state.rules.ready_buffer - len(queues.by_stage[RUN]) - len(queues.held)
    room -= sum(len(e.waiting) for e in state.environments.values() if e.lease)
    chosen = []
    for key in queues.by_stage[INIT].first(free):
        if room <= 0:
            break
        chosen.append(key)
        room -= len(state.environments[key].waiting)
    return chosen


def _priority(ledger: Ledger, rollout_id: str) -> int:
    return ledger.state.groups[ledger.state.rollouts[rollout_id].group].priority


def _is_warm(ledger: Ledger, rollout_id: str, warm: Collection[str]) -> bool:
    group = ledger.state.groups[ledger.state.rollouts[rollout_id].group]
    return ledger.state.environments[group.environment].layer in warm
