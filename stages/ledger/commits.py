"""What the result or the loss of a lease means for its work: the next stage, another try, or the end."""

from __future__ import annotations

from typing import Final

from stages.ledger import checkpoints, lag, outcomes
from stages.ledger.book import Book
from stages.ledger.endings import end, settle
from stages.ledger.events import CommitItem, Committed
from stages.ledger.outcomes import CHECKPOINT, GIVEN_BACK, OUTCOMES
from stages.ledger.state import EVAL, INIT, QUEUED, RUN, EnvironmentState, Lease, Rollout

REMEMBERED_COMMITS: Final = 65_536
"""Lease ids whose commit is answered `already` when presented again; older ones are answered `superseded`."""
LOSSES_PER_ATTEMPT: Final = 3
"""A lost worker is seldom the rollout's fault: losses have their own budget, this many for each allowed attempt."""
BACKOFF_S: Final = (0.2, 15.0)
"""First and longest wait before a failed attempt is tried again; doubled in between."""


def commit(book: Book, event: Committed) -> list[str]:
    """Take in a member's results; returns `ok`, `already` or `superseded` for each."""
    statuses = []
    for item in event.commits:
        lease = book.state.leases.get(item.lease)
        if lease is None or lease.member != event.member:
            statuses.append(_refused(book, item))
            continue
        book.state.last_progress = book.state.now
        book.state.counts.wasted_tokens += item.wasted_tokens
        if lease.stage == RUN and item.checkpoint is not None:
            checkpoints.keep(book, book.state.rollouts[lease.work], item.checkpoint)
        if item.outcome == CHECKPOINT:
            statuses.append("ok")
            continue
        book.drop_lease(item.lease)
        _remember(book, item.lease)
        if lease.stage == INIT:
            _environment_done(book, lease, item)
        else:
            rollout = book.state.rollouts[lease.work]
            rollout.lease = 0
            (_run_done if lease.stage == RUN else _eval_done)(book, rollout, item)
        statuses.append("ok")
    book.fill_ready_buffer()
    return statuses


def _refused(book: Book, item: CommitItem) -> str:
    """What a result without its lease is answered; one that came too late is kept readable and counts for nothing."""
    if item.lease in book.state.committed:
        return "already"
    if item.segment is not None:
        book.state.superseded[item.segment.path] = None
    return "superseded"


def _remember(book: Book, lease_id: int) -> None:
    committed = book.state.committed
    committed[lease_id] = None
    if len(committed) > REMEMBERED_COMMITS:
        del committed[next(iter(committed))]


def _environment_done(book: Book, lease: Lease, item: CommitItem) -> None:
    environment = book.state.environments[lease.work]
    if item.outcome == outcomes.OK:
        counts = book.state.counts
        if item.cached:
            counts.init_cached += 1
        else:
            counts.init_prepared += 1
        environment.layer = item.layer
        for rollout in _release_waiting(book, environment):
            rollout.init_s = item.service_s
            book.hold(rollout)
        return
    _requeue_waiting(book, environment)
    if item.outcome == GIVEN_BACK:
        book.enqueue_environment(environment)
        return
    _count_attempt(book, item.outcome)
    environment.tries += 1
    if _is_retried(item) and environment.tries < book.state.rules.max_attempts:
        book.state.counts.retries += 1
        book.delay(INIT, environment.key, environment.order, _backoff_s(environment.tries))
        return
    _environment_failed(book, environment, item.outcome, item.message)


def _environment_failed(book: Book, environment: EnvironmentState, outcome: str, message: str) -> None:
    # Forgotten, so that a later submission of the same environment tries afresh.
    waiting = _release_waiting(book, environment)
    del book.state.environments[environment.key]
    for rollout in waiting:
        rollout.failures = environment.tries
        end(book, rollout, outcome, message)


def _release_waiting(book: Book, environment: EnvironmentState) -> list[Rollout]:
    _requeue_waiting(book, environment)
    waiting = [book.state.rollouts[r] for r in environment.waiting]
    environment.waiting = {}
    return waiting


def _requeue_waiting(book: Book, environment: EnvironmentState) -> None:
    for rollout_id in environment.waiting:
        rollout = book.state.rollouts[rollout_id]
        rollout.state, rollout.queued_at = QUEUED, book.state.now


def _run_done(book: Book, rollout: Rollout, item: CommitItem) -> None:
    book.state.fleet.release(rollout.id)
    if item.outcome == GIVEN_BACK:
        book.enqueue(rollout, RUN)
        return
    rule = OUTCOMES[item.outcome]
    if rule.status == "completed":
        rollout.outcome, rollout.message, rollout.segment = item.outcome, item.message, item.segment
        rollout.run_s, rollout.llm_s, rollout.tool_s = item.service_s, item.llm_s, item.tool_s
        rollout.min_policy_version = item.min_policy_version
        if item.segment is not None:
            book.state.segments[item.segment.path] += 1
        checkpoints.drop(book, rollout)
        if lag.drop_if_stale(book, book.state.groups[rollout.group]):
            return
        _count_attempt(book, item.outcome)
        rollout.tries = 0
        book.enqueue(rollout, EVAL)
        return
    if item.outcome != "llm":  # the fault may lie in what the checkpoint holds
        checkpoints.waste(book, rollout)
    _attempt_failed(book, rollout, RUN, item)


def _eval_done(book: Book, rollout: Rollout, item: CommitItem) -> None:
    if item.outcome == GIVEN_BACK:
        book.enqueue(rollout, EVAL)
        return
    if OUTCOMES[item.outcome].status != "completed":
        _attempt_failed(book, rollout, EVAL, item)
        return
    _count_attempt(book, item.outcome)
    # What RUN ended with stands, unless the verifier caught the agent at something.
    outcome = rollout.outcome if item.outcome == outcomes.OK else item.outcome
    message = item.message or rollout.message
    group = book.state.groups[rollout.group]
    if book.max_lag(group) is None:
        end(book, rollout, outcome, message, item)
    elif not lag.drop_if_stale(book, group):
        rollout.outcome, rollout.message, rollout.graded = outcome, message, item
        rollout.stage, rollout.state, rollout.queued_at = EVAL, QUEUED, book.state.now
        settle(book, group)


def _attempt_failed(book: Book, rollout: Rollout, stage: str, item: CommitItem) -> None:
    _count_attempt(book, item.outcome)
    rollout.tries += 1
    rollout.failures += 1
    rollout.message = item.message
    if _is_retried(item) and rollout.tries < book.state.rules.max_attempts:
        book.state.counts.retries += 1
        rollout.stage, rollout.state = stage, QUEUED
        book.delay(stage, rollout.id, rollout.order, _backoff_s(rollout.tries))
    else:
        end(book, rollout, item.outcome, item.message)


def _is_retried(item: CommitItem) -> bool:
    return OUTCOMES[item.outcome].retried and not item.final


def _count_attempt(book: Book, outcome: str) -> None:
    book.state.counts.attempts_ended += 1
    if OUTCOMES[outcome].retried:
        book.state.counts.infra_failures += 1


def _backoff_s(tries: int) -> float:
    first, longest = BACKOFF_S
    return min(longest, first * 2.0 ** (tries - 1))


def lose(book: Book, lease: Lease, reason: str) -> None:
    """A lease is over without a result: its work is queued again, within the budget of losses."""
    book.drop_lease(lease.id, revoke=reason)
    book.state.counts.infra_failures += 1
    book.state.counts.attempts_ended += 1
    budget = LOSSES_PER_ATTEMPT * book.state.rules.max_attempts
    if lease.stage == INIT:
        environment = book.state.environments[lease.work]
        environment.losses += 1
        _requeue_waiting(book, environment)
        if environment.losses < budget:
            book.enqueue_environment(environment)
        else:
            _environment_failed(book, environment, "infrastructure", f"lost {environment.losses} times: {reason}")
        return
    rollout = book.state.rollouts[lease.work]
    rollout.losses += 1
    if lease.stage == RUN:
        book.state.fleet.release(rollout.id)
    if rollout.losses < budget:
        book.enqueue(rollout, lease.stage)
    else:
        end(book, rollout, "infrastructure", f"lost {rollout.losses} times: {reason}")
