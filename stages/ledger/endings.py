"""How work ends: commits, retries, lost leases, cancelled rollouts and closed groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stages.ledger import checkpoints, lag, outcomes
from stages.ledger.effects import Failed, Publish
from stages.ledger.events import CommitItem, Committed
from stages.ledger.outcomes import CHECKPOINT, GIVEN_BACK, OUTCOMES
from stages.ledger.state import EVAL, INIT, QUEUED, RUN, Closing, EnvironmentState, Group, Lease, Rollout
from stages.shards.index import GroupLine, RowsLine

if TYPE_CHECKING:
    from stages.ledger.machine import Ledger

REMEMBERED_COMMITS: Final = 65_536
"""Lease ids whose commit is answered `already` when presented again; older ones are answered `superseded`."""
LOSSES_PER_ATTEMPT: Final = 3
"""A lost worker is seldom the rollout's fault: losses have their own budget, this many for each allowed attempt."""
BACKOFF_S: Final = (0.2, 15.0)
"""First and longest wait before a failed attempt is tried again; doubled in between."""


def commit(ledger: Ledger, event: Committed) -> list[str]:
    """Take in a member's results; returns `ok`, `already` or `superseded` for each."""
    statuses = []
    for item in event.commits:
        lease = ledger.state.leases.get(item.lease)
        if lease is None or lease.member != event.member:
            statuses.append(_refused(ledger, item))
            continue
        ledger.state.last_progress = ledger.state.now
        ledger.state.counts.wasted_tokens += item.wasted_tokens
        if lease.stage == RUN and item.checkpoint is not None:
            checkpoints.keep(ledger, ledger.state.rollouts[lease.work], item.checkpoint)
        if item.outcome == CHECKPOINT:
            statuses.append("ok")
            continue
        ledger.drop_lease(item.lease)
        _remember(ledger, item.lease)
        if lease.stage == INIT:
            _environment_done(ledger, lease, item)
        else:
            rollout = ledger.state.rollouts[lease.work]
            rollout.lease = 0
            (_run_done if lease.stage == RUN else _eval_done)(ledger, rollout, item)
        statuses.append("ok")
    ledger.fill_ready_buffer()
    return statuses


def _refused(ledger: Ledger, item: CommitItem) -> str:
    """What a result without its lease is answered; one that came too late is kept readable and counts for nothing."""
    if item.lease in ledger.state.committed:
        return "already"
    if item.segment is not None:
        ledger.state.superseded[item.segment.path] = None
    return "superseded"


def _remember(ledger: Ledger, lease_id: int) -> None:
    committed = ledger.state.committed
    committed[lease_id] = None
    if len(committed) > REMEMBERED_COMMITS:
        del committed[next(iter(committed))]


def _environment_done(ledger: Ledger, lease: Lease, item: CommitItem) -> None:
    environment = ledger.state.environments[lease.work]
    if item.outcome == outcomes.OK:
        counts = ledger.state.counts
        if item.cached:
            counts.init_cached += 1
        else:
            counts.init_prepared += 1
        environment.layer = item.layer
        for rollout in _release_waiting(ledger, environment):
            rollout.init_s = item.service_s
            ledger.hold(rollout)
        return
    _requeue_waiting(ledger, environment)
    if item.outcome == GIVEN_BACK:
        ledger.enqueue_environment(environment)
        return
    _count_attempt(ledger, item.outcome)
    environment.tries += 1
    if _is_retried(item) and environment.tries < ledger.state.rules.max_attempts:
        ledger.state.counts.retries += 1
        ledger.delay(INIT, environment.key, environment.order, _backoff_s(environment.tries))
        return
    _environment_failed(ledger, environment, item.outcome, item.message)


def _environment_failed(ledger: Ledger, environment: EnvironmentState, outcome: str, message: str) -> None:
    # Forgotten, so that a later submission of the same environment tries afresh.
    waiting = _release_waiting(ledger, environment)
    del ledger.state.environments[environment.key]
    for rollout in waiting:
        rollout.failures = environment.tries
        end(ledger, rollout, outcome, message)


def _release_waiting(ledger: Ledger, environment: EnvironmentState) -> list[Rollout]:
    _requeue_waiting(ledger, environment)
    waiting = [ledger.state.rollouts[r] for r in environment.waiting]
    environment.waiting = {}
    return waiting


def _requeue_waiting(ledger: Ledger, environment: EnvironmentState) -> None:
    for rollout_id in environment.waiting:
        rollout = ledger.state.rollouts[rollout_id]
        rollout.state, rollout.queued_at = QUEUED, ledger.state.now


def _run_done(ledger: Ledger, rollout: Rollout, item: CommitItem) -> None:
    ledger.state.fleet.release(rollout.id)
    if item.outcome == GIVEN_BACK:
        ledger.enqueue(rollout, RUN)
        return
    rule = OUTCOMES[item.outcome]
    if rule.status == "completed":
        rollout.outcome, rollout.message, rollout.segment = item.outcome, item.message, item.segment
        rollout.run_s, rollout.llm_s, rollout.tool_s = item.service_s, item.llm_s, item.tool_s
        rollout.min_policy_version = item.min_policy_version
        if item.segment is not None:
            ledger.state.segments[item.segment.path] += 1
        checkpoints.drop(ledger, rollout)
        if lag.drop_if_stale(ledger, ledger.state.groups[rollout.group]):
            return
        _count_attempt(ledger, item.outcome)
        rollout.tries = 0
        ledger.enqueue(rollout, EVAL)
        return
    if item.outcome != "llm":  # the fault may lie in what the checkpoint holds
        checkpoints.waste(ledger, rollout)
    _attempt_failed(ledger, rollout, RUN, item)


def _eval_done(ledger: Ledger, rollout: Rollout, item: CommitItem) -> None:
    if item.outcome == GIVEN_BACK:
        ledger.enqueue(rollout, EVAL)
        return
    if OUTCOMES[item.outcome].status != "completed":
        _attempt_failed(ledger, rollout, EVAL, item)
        return
    _count_attempt(ledger, item.outcome)
    # What RUN ended with stands, unless the verifier caught the agent at something.
    outcome = rollout.outcome if item.outcome == outcomes.OK else item.outcome
    message = item.message or rollout.message
    group = ledger.state.groups[rollout.group]
    if lag.bound(ledger, group) is None:
        end(ledger, rollout, outcome, message, item)
    elif not lag.drop_if_stale(ledger, group):
        rollout.outcome, rollout.message, rollout.graded = outcome, message, item
        rollout.stage, rollout.state, rollout.queued_at = EVAL, QUEUED, ledger.state.now
        _settle(ledger, group)


def _attempt_failed(ledger: Ledger, rollout: Rollout, stage: str, item: CommitItem) -> None:
    _count_attempt(ledger, item.outcome)
    rollout.tries += 1
    rollout.failures += 1
    rollout.message = item.message
    if _is_retried(item) and rollout.tries < ledger.state.rules.max_attempts:
        ledger.state.counts.retries += 1
        rollout.stage, rollout.state = stage, QUEUED
        ledger.delay(stage, rollout.id, rollout.order, _backoff_s(rollout.tries))
    else:
        end(ledger, rollout, item.outcome, item.message)


def _is_retried(item: CommitItem) -> bool:
    return OUTCOMES[item.outcome].retried and not item.final


def _count_attempt(ledger: Ledger, outcome: str) -> None:
    ledger.state.counts.attempts_ended += 1
    if OUTCOMES[outcome].retried:
        ledger.state.counts.infra_failures += 1


def _backoff_s(tries: int) -> float:
    first, longest = BACKOFF_S
    return min(longest, first * 2.0 ** (tries - 1))


def lose(ledger: Ledger, lease: Lease, reason: str) -> None:
    """A lease is over without a result: its work is queued again, within the budget of losses."""
    ledger.drop_lease(lease.id, revoke=reason)
    ledger.state.counts.infra_failures += 1
    ledger.state.counts.attempts_ended += 1
    budget = LOSSES_PER_ATTEMPT * ledger.state.rules.max_attempts
    if lease.stage == INIT:
        environment = ledger.state.environments[lease.work]
        environment.losses += 1
        _requeue_waiting(ledger, environment)
        if environment.losses < budget:
            ledger.enqueue_environment(environment)
        else:
            _environment_failed(ledger, environment, "infrastructure", f"lost {environment.losses} times: {reason}")
        return
    rollout = ledger.state.rollouts[lease.work]
    rollout.losses += 1
    if lease.stage == RUN:
        ledger.state.fleet.release(rollout.id)
    if rollout.losses < budget:
        ledger.enqueue(rollout, lease.stage)
    else:
        end(ledger, rollout, "infrastructure", f"lost {rollout.losses} times: {reason}")


def end(ledger: Ledger, rollout: Rollout, outcome: str, message: str, item: CommitItem | None = None) -> None:
    """The rollout's one terminal entry; closes its group when it was the last."""
    group = ledger.state.groups[rollout.group]
    end_alone(ledger, rollout, outcome, message, item)
    _settle(ledger, group)


def end_alone(ledger: Ledger, rollout: Rollout, outcome: str, message: str, item: CommitItem | None = None) -> None:
    """The rollout's one terminal entry, without what follows for its group: who calls this closes the group."""
    _forget(ledger, rollout)
    state = ledger.state
    group = state.groups[rollout.group]
    rule = OUTCOMES[outcome]
    reward = {"verifier": item.reward if item else None, "zero": 0.0, "none": None}[rule.reward]
    row = item.row if item is not None else None
    state.seq += 1
    line = RowsLine(
        seq=state.seq, rollout_id=rollout.id, group_id=group.id, task_id=group.task_id, tag=group.tag,
        status=rule.status, failure_class=outcomes.failure_class(outcome), reward=reward,
        mask_sample=rule.mask_sample, min_policy_version=rollout.min_policy_version,
        shard=row.path if row else None, offset=row.offset if row else None, length=row.length if row else None,
        crc32=row.crc32 if row else None, chains=item.chains if item and row else 0,
    )  # fmt: skip
    ledger.effects.append(Publish(line))
    if rule.status != "completed":
        ledger.effects.append(Failed(state.seq, _failure_line(ledger, rollout, group, rule.status, outcome, message)))
    _count_end(ledger, rule.status, outcome, reward, item)
    state.last_progress = state.now
    group.open -= 1
    if rule.in_statistics:
        group.usable += 1


def _settle(ledger: Ledger, group: Group) -> None:
    """Close the group where nothing of it is left to do, or where it has enough.

    What a group with a lag bound holds back counts as done: it is published here, all at once.
    """
    held = lag.held_back(ledger, group)
    if len(held) == group.open:
        for rollout in held:
            end_alone(ledger, rollout, rollout.outcome, rollout.message, rollout.graded)
        close(ledger, group)
        return
    usable = group.usable + sum(OUTCOMES[rollout.outcome].in_statistics for rollout in held)
    if group.min_usable is not None and usable >= group.min_usable:
        cancel_open(ledger, group, "min_usable", f"the group has its {group.min_usable} usable rollouts")


def _failure_line(
    ledger: Ledger, rollout: Rollout, group: Group, status: str, outcome: str, message: str
) -> dict[str, object]:
    return {
        "seq": ledger.state.seq, "rollout_id": rollout.id, "group_id": group.id, "task_id": group.task_id,
        "tag": group.tag, "status": status, "class": outcome, "boundary": rollout.stage, "message": message,
        "attempts": max(rollout.attempt, rollout.failures, rollout.losses), "t": ledger.state.now,
    }  # fmt: skip


def _forget(ledger: Ledger, rollout: Rollout) -> None:
    """Take the rollout out of every place that knows it; its worker is told if it still holds a lease."""
    state = ledger.state
    del state.rollouts[rollout.id]
    for queue in (*ledger.queues.by_stage.values(), ledger.queues.held):
        queue.discard(rollout.id)
    if rollout.lease:
        ledger.drop_lease(rollout.lease, revoke="the rollout has ended")
    state.fleet.release(rollout.id)
    environment = state.environments.get(state.groups[rollout.group].environment)
    if environment is not None and rollout.id in environment.waiting:
        del environment.waiting[rollout.id]
        if not environment.waiting:
            ledger.queues.by_stage[INIT].discard(environment.key)
    checkpoints.drop(ledger, rollout)
    if rollout.segment is not None:
        checkpoints.release(ledger, rollout.segment.path)


def _count_end(ledger: Ledger, status: str, outcome: str, reward: float | None, item: CommitItem | None) -> None:
    counts = ledger.state.counts
    setattr(counts, status, getattr(counts, status) + 1)
    counts.by_class[outcome] += 1
    if reward is not None:
        counts.reward_sum += reward
        counts.reward_n += 1
    if item is not None:
        counts.tokens += item.tokens


def cancel_open(ledger: Ledger, group: Group, closing: Closing, reason: str) -> int:
    """Close a group now: what it holds back is published, what is still open ends as cancelled; returns how many.

    `closing` becomes the group line's closed_by.
    """
    group.closing = closing
    still_open = [ledger.state.rollouts[r] for r in group.rollouts if r in ledger.state.rollouts]
    for rollout in still_open:
        if rollout.graded is not None:
            end_alone(ledger, rollout, rollout.outcome, rollout.message, rollout.graded)
        else:
            end_alone(ledger, rollout, "cancelled", reason)
    close(ledger, group)
    return sum(rollout.graded is None for rollout in still_open)


def close(ledger: Ledger, group: Group) -> None:
    """The group's one line; the group leaves memory."""
    state = ledger.state
    state.seq += 1
    line = GroupLine(
        seq=state.seq, group_id=group.id, tag=group.tag, closed_by=group.closing, usable=group.usable,
        rollout_ids=group.rollouts,
    )  # fmt: skip
    ledger.effects.append(Publish(line))
    state.counts.groups_closed += 1
    del state.groups[group.id]
