"""A drain in mid-rollout, continued elsewhere: no turn is lost, and the sandbox is as it was left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.handoff import decode_checkpoint
from stages.journal.history import read_events
from stages.layout import RunLayout
from stages.ledger.events import CommitItem, Committed, Leased
from stages.shards.reader import ShardReader
from stages.trajectory import Chain
from tests.support import runs
from tests.support.agents import told_after

TURNS = 8
OPTIONS = (
    "task.limit=2", "group_size=2", "pools.run.workers=2", "pools.run.slots=2", "sampling.max_tokens=12",
    "agent._target_=tests.support.agents.Steps", f"+agent.options.turns={TURNS}",
)  # fmt: skip
"""Four rollouts of eight turns over two workers."""
QUICK_LEASES = ("lease.ttl_s=4", "lease.heartbeat_s=1")


def commits(run_dir: Path, wanted: Callable[[str, CommitItem], bool]) -> list[tuple[str, CommitItem]]:
    """(member, item) of the journal's commits so far that are wanted."""
    events = [event for event in read_events(RunLayout(run_dir)) if isinstance(event, Committed)]
    return [(event.member, item) for event in events for item in event.commits if wanted(event.member, item)]


def of_lease(number: int) -> Callable[[str, CommitItem], bool]:
    return lambda _, item: item.lease == number


def pid_of(run_dir: Path, member: str) -> int:
    return next(int(found["pid"]) for found in runs.members(run_dir) if found["id"] == member)


def rollout_of(run_dir: Path, lease: int) -> str:
    """Leases are numbered in the order of the journal."""
    work = [(event.member, one) for event in read_events(RunLayout(run_dir)) if isinstance(event, Leased)
            for one in event.work]  # fmt: skip
    return work[lease - 1][1]


def taken_up_by(run_dir: Path, rollout_id: str) -> list[str]:
    """Members that RUN was leased to, in order."""
    return [event.member for event in read_events(RunLayout(run_dir))
            if isinstance(event, Leased) and event.stage == "run" and rollout_id in event.work]  # fmt: skip


def only_row(run_dir: Path, rollout_id: str) -> dict[str, Any]:
    """The rollout's one chain as its shard has it."""
    found = ShardReader(run_dir).get(rollout_id)
    assert found is not None and found.batch is not None
    (row,) = found.batch.to_pylist()
    return dict(row)


def is_prefix(early: Chain, row: dict[str, Any]) -> bool:
    length = len(early.token_ids)
    return (
        early.token_ids == row["token_ids"][:length]
        and early.loss_mask == row["loss_mask"][:length]
        and early.logprobs == pytest.approx(row["logprobs"][:length], abs=1e-6)
        and [(s.version, s.start, s.end) for s in early.policy_versions]
        == [(s["version"], s["start"], s["end"]) for s in row["policy_versions"][: len(early.policy_versions)]]
        and [(t.start, t.end) for t in early.turns]
        == [(t["start"], t["end"]) for t in row["turns"][: len(early.turns)]]
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_drained_rollout_goes_on_in_the_other_worker_with_the_same_tokens(tmp_path: Path, number: int) -> None:
    run_dir, found = tmp_path / "run", {}
    with runs.running(run_dir, *OPTIONS, "checkpoint.turns=2") as process:

        def periodic() -> list[tuple[str, CommitItem]]:
            assert process.poll() is None, process.communicate()
            return (
                commits(run_dir, lambda _, item: item.outcome == "checkpoint") if (run_dir / "journal").is_dir() else []
            )

        member, _ = runs.poll(periodic, "a checkpoint while its lease goes on")[0]
        os.kill(pid_of(run_dir, member), number)

        def given_back() -> list[tuple[str, CommitItem]]:
            return commits(run_dir, lambda who, item: who == member and item.outcome == "given_back")

        drained = runs.poll(given_back, "leases given back")
        for _, item in drained:
            assert item.wasted_tokens == 0
            # One that was just made at the same boundary is not made again.
            place = [one.checkpoint for _, one in commits(run_dir, of_lease(item.lease)) if one.checkpoint][-1]
            data = (run_dir / place.path).read_bytes()[place.offset : place.offset + place.length]
            record = decode_checkpoint(data, "here")
            assert sum(sum(chain.loss_mask) for chain in record.stream.chains) == place.tokens
            found[record.rollout_id] = record
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    runs.exactly_once(run_dir, 4)
    assert found
    for rollout_id, record in found.items():
        workers = taken_up_by(run_dir, rollout_id)
        assert len(workers) == 2 and workers[0] == member != workers[1]
        row = only_row(run_dir, rollout_id)
        (early,) = record.stream.chains
        assert 0 < len(early.turns) < TURNS and len(row["turns"]) == TURNS
        assert is_prefix(early, row)
    for line in runs.rows(run_dir):
        row = only_row(run_dir, line["rollout_id"])
        assert told_after(TURNS - 1) in row["messages"]
    summary = runs.summary(run_dir)
    assert summary["wasted_tokens"] == 0 and summary["checkpoints"] > len(found)
    assert list((run_dir / "handoff").iterdir()) == []


def test_a_killed_worker_costs_what_came_after_the_checkpoint_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with runs.running(run_dir, *OPTIONS, "checkpoint.turns=1") as process:

        def later() -> list[tuple[str, CommitItem]]:
            assert process.poll() is None, process.communicate()
            seen = lambda _, item: item.checkpoint is not None and item.checkpoint.turns >= 3  # noqa: E731
            return commits(run_dir, seen) if (run_dir / "journal").is_dir() else []

        member, item = runs.poll(later, "a checkpoint of three turns")[0]
        rollout_id = rollout_of(run_dir, item.lease)
        os.kill(pid_of(run_dir, member), signal.SIGKILL)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    runs.exactly_once(run_dir, 4)
    row = only_row(run_dir, rollout_id)
    assert len(taken_up_by(run_dir, rollout_id)) == 2 and len(row["turns"]) == TURNS
    assert told_after(TURNS - 1) in row["messages"]


def test_resume_carries_a_dead_run_on_from_its_own_config(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with runs.running(run_dir, *OPTIONS, "checkpoint.turns=1", *QUICK_LEASES) as process:
        kept = lambda _, item: item.checkpoint is not None  # noqa: E731
        runs.poll(lambda: (run_dir / "journal").is_dir() and commits(run_dir, kept), "a checkpoint")
        pids = [member["pid"] for member in runs.members(run_dir)]
        process.kill()
        for pid in pids:  # as when the node is lost
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    runs.poll(lambda: not runs.alive(pids), "the processes end")
    result = runs.verb("resume", run_dir)
    assert result.returncode == 0, result.stderr
    assert "4 completed" in result.stdout
    runs.exactly_once(run_dir, 4)
    for line in runs.rows(run_dir):
        assert told_after(TURNS - 1) in only_row(run_dir, line["rollout_id"])["messages"]
    assert runs.replayed(run_dir).state.epoch == 2
    again = runs.verb("resume", run_dir)
    assert again.returncode == 0 and "4 completed" in again.stdout
