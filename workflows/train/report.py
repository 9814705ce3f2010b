"""What training came to: report/train.json, and the few lines that people see at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workflows.train.records import Record
from workflows.train.samples import mean


def summary(records: Sequence[Record], **about: Any) -> dict[str, Any]:
    """report/train.json: the first and the last measurement, extremes, totals. Shares are of 1, times in seconds.

    Args:
        records: all updates.
        about: what else is known: the run, its settings.
    """
    updates = [record for record in records if record.step]
    measured = [record for record in records if record.heldout is not None]
    spent = {
        "rollout": sum(record.rollout_s for record in updates),
        "train": sum(record.train_s for record in updates),
        "push": sum(record.push_s for record in updates),
        "heldout": sum(record.heldout_s for record in records),
    }
    tokens = sum(record.tokens for record in updates)
    used = [group for record in updates for group in record.groups]
    return {
        "v": 1, **about,
        "updates": len(updates),
        "heldout_first": _measured(measured[0]) if measured else None,
        "heldout_last": _measured(measured[-1]) if measured else None,
        "reward_first": mean([record.reward for record in updates[:5]]),
        "reward_last": mean([record.reward for record in updates[-5:]]),
        "gap_max": max((record.gap_max for record in updates), default=0.0),
        "gap_mean": mean([record.gap_mean for record in updates]),
        "gap_tokens": sum(record.gap_tokens for record in updates),
        "lag_mean": mean([record.lag_mean for record in updates]),
        "lag_max": max((record.lag_max for record in updates), default=0),
        "clip_share": mean([record.clip_share for record in updates]),
        "groups_asked": sum(record.groups_asked for record in updates),
        "groups_kept": len(used),
        "groups_used_twice": len(used) - len(set(used)),
        "groups_flat": sum(record.groups_flat for record in updates),
        "masked": sum(record.masked for record in updates),
        "samples": sum(record.samples for record in updates),
        "reencoded": sum(record.reencoded for record in updates),
        "broken": sum(record.broken for record in updates),
        "tokens": tokens,
        "tokens_per_s": tokens / max(1e-9, spent["rollout"] + spent["train"] + spent["push"]),
        "seconds": {**spent, "all": records[-1].elapsed_s if records else 0.0},
    }  # fmt: skip


def _measured(record: Record) -> dict[str, Any]:
    return {
        "step": record.step, "value": record.heldout, "low": record.heldout_low, "high": record.heldout_high,
        "problems": record.heldout_problems,
    }  # fmt: skip


def lines(made: dict[str, Any]) -> str:
    """The report for people."""
    spent = made["seconds"]
    return "".join(
        f"{name:<10}{text}\n"
        for name, text in (
            ("held out", f"{_interval(made['heldout_first'])}  ->  {_interval(made['heldout_last'])}"),
            ("reward", f"{made['reward_first']:.3f}  ->  {made['reward_last']:.3f}"),
            ("updates", f"{made['updates']} from {made['groups_kept']} of {made['groups_asked']} groups"),
            ("gap", f"{made['gap_max']:.1e} at most over {made['gap_tokens']} tokens"),
            ("lag", f"{made['lag_mean']:.2f} versions, {made['lag_max']} at most"),
            (
                "seconds",
                f"{spent['rollout']:.0f} waiting for rollouts, {spent['train']:.0f} learning, {spent['push']:.0f} "
                f"pushing, {spent['heldout']:.0f} measuring; {made['tokens_per_s']:.0f} tokens/s",
            ),
        )
    )


def _interval(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not measured"
    return f"{found['value']:.3f} (95 %: {found['low']:.3f} to {found['high']:.3f})"
