"""The last entries: one index line a rollout, one a group, and everything that must forget them."""

from __future__ import annotations

from stages.ledger import checkpoints, outcomes
from stages.ledger.book import Book
from stages.ledger.effects import Failed, Publish
from stages.ledger.events import CommitItem
from stages.ledger.outcomes import OUTCOMES
from stages.ledger.state import INIT, Callback, Group, Rollout
from stages.shards.index import GroupLine, RowsLine


def end_alone(book: Book, rollout: Rollout, outcome: str, message: str, item: CommitItem | None = None) -> None:
    """The rollout's one terminal entry, without what follows for its group: who calls this closes the group."""
    _forget(book, rollout)
    state = book.state
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
    book.effects.append(Publish(line))
    if rule.status != "completed":
        book.effects.append(Failed(state.seq, _failure_line(book, rollout, group, rule.status, outcome, message)))
    _count_end(book, rule.status, outcome, reward, item)
    state.last_progress = state.now
    group.open -= 1
    if rule.in_statistics:
        group.usable += 1


def close(book: Book, group: Group) -> None:
    """The group's one line; the group leaves memory."""
    state = book.state
    state.seq += 1
    line = GroupLine(
        seq=state.seq, group_id=group.id, tag=group.tag, closed_by=group.closing, usable=group.usable,
        rollout_ids=group.rollouts,
    )  # fmt: skip
    book.effects.append(Publish(line))
    state.counts.groups_closed += 1
    if group.callback_url is not None:
        state.callbacks[group.id] = Callback(group.callback_url, state.seq, state.now)
    del state.groups[group.id]


def _failure_line(
    book: Book, rollout: Rollout, group: Group, status: str, outcome: str, message: str
) -> dict[str, object]:
    return {
        "seq": book.state.seq, "rollout_id": rollout.id, "group_id": group.id, "task_id": group.task_id,
        "tag": group.tag, "status": status, "class": outcome, "boundary": rollout.stage, "message": message,
        "attempts": max(rollout.attempt, rollout.failures, rollout.losses), "t": book.state.now,
    }  # fmt: skip


def _forget(book: Book, rollout: Rollout) -> None:
    """Take the rollout out of every place that knows it; its worker is told if it still holds a lease."""
    state = book.state
    del state.rollouts[rollout.id]
    for queue in (*book.queues.by_stage.values(), book.queues.held):
        queue.discard(rollout.id)
    if rollout.lease:
        book.drop_lease(rollout.lease, revoke="the rollout has ended")
    state.fleet.release(rollout.id)
    environment = state.environments.get(state.groups[rollout.group].environment)
    if environment is not None and rollout.id in environment.waiting:
        del environment.waiting[rollout.id]
        if not environment.waiting:
            book.queues.by_stage[INIT].discard(environment.key)
    checkpoints.drop(book, rollout)
    if rollout.segment is not None:
        checkpoints.release(book, rollout.segment.path)


def _count_end(book: Book, status: str, outcome: str, reward: float | None, item: CommitItem | None) -> None:
    counts = book.state.counts
    setattr(counts, status, getattr(counts, status) + 1)
    counts.by_class[outcome] += 1
    if reward is not None:
        counts.reward_sum += reward
        counts.reward_n += 1
    if item is not None:
        counts.tokens += item.tokens
