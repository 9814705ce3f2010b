"""What status and metrics say of a ledger: pure functions of its state."""

from __future__ import annotations

from typing import Any

from stages.ledger.machine import Ledger
from stages.ledger.outcomes import OK
from stages.ledger.state import STAGES


def stages_view(ledger: Ledger) -> dict[str, dict[str, int]]:
    """Queued and leased rollouts a stage; INIT counts the rollouts that wait for an environment or for the buffer.

    A graded rollout that waits for its group is open and in no stage.
    """
    view = {stage: {"queued": 0, "leased": 0} for stage in STAGES}
    for rollout in ledger.state.rollouts.values():
        if rollout.graded is not None:
            continue
        view[rollout.stage][rollout.state] += 1
    return view


def status_view(ledger: Ledger) -> dict[str, Any]:
    """The ledger's part of `rollmill status --json`."""
    state = ledger.state
    counts = state.counts
    return {
        "run_id": state.run_id,
        "state": "draining" if state.draining else "running",
        "epoch": state.epoch,
        "stages": stages_view(ledger),
        "rollouts": {
            "accepted": counts.accepted, "completed": counts.completed, "failed": counts.failed,
            "cancelled": counts.cancelled, "open": len(state.rollouts),
        },
        "groups": {
            "accepted": counts.groups_accepted, "closed": counts.groups_closed, "open": len(state.groups),
        },
        "reward": {"mean": counts.reward_sum / counts.reward_n if counts.reward_n else None, "n": counts.reward_n},
        "init": {"prepared": counts.init_prepared, "cached": counts.init_cached},
        "failures": {outcome: n for outcome, n in counts.by_class.items() if outcome != OK},
        "retries": counts.retries,
        "infra_failure_ratio": counts.infra_failures / counts.attempts_ended if counts.attempts_ended else 0.0,
        "tokens": counts.tokens,
        "checkpoints": counts.checkpoints,
        "wasted_tokens": counts.wasted_tokens,
        "policy_version": state.policy_version,
        "seq": state.seq,
        "last_progress": state.last_progress,
    }  # fmt: skip
