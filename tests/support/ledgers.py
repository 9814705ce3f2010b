"""A ledger driven by hand: short calls for tests, and the oracle of what must hold after every event."""

from __future__ import annotations

from collections import Counter
from typing import Any

from stages.ledger import grants
from stages.ledger.effects import Effect, Failed, Publish
from stages.ledger.events import (
    AnyEvent,
    Cancelled,
    CommitItem,
    Committed,
    EpochBegan,
    GroupSpec,
    Leased,
    MemberGone,
    Rules,
    Submitted,
    Tick,
)
from stages.ledger.machine import Ledger
from stages.ledger.state import Lease
from stages.shards.index import GroupLine, RowsLine
from stages.trajectory import CheckpointRange, RowRange

ROW = RowRange("shards/eval-1-x-0.arrows", 8, 16, 7)
SEGMENT = RowRange("handoff/run-1-x-0.seg", 0, 64, 9)


class Driven:
    """A Ledger with a clock of its own and everything it ever published."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.ledger = Ledger()
        self.t = 1000.0
        self.events: list[AnyEvent] = []
        self.lines: list[RowsLine | GroupLine] = []
        self.failed: list[dict[str, Any]] = []
        self.groups = 0
        self.bounds: dict[str, int | None] = {}
        self.at_close: dict[str, tuple[int | None, int]] = {}
        self.apply(EpochBegan(t=self.t, epoch=1, run_id="r", history=[], rules=rules or Rules()))

    def apply(self, event: AnyEvent) -> Any:
        self.events.append(event)
        reply, effects = self.ledger.apply(event)
        self._take(effects)
        return reply

    def _take(self, effects: list[Effect]) -> None:
        self.lines += [effect.line for effect in effects if isinstance(effect, Publish)]
        state = self.ledger.state
        for effect in effects:
            if isinstance(effect, Publish) and isinstance(effect.line, GroupLine):
                bound = self.bounds.get(effect.line.group_id)
                bound = state.rules.max_lag if bound is None else bound
                self.at_close[effect.line.group_id] = (bound, state.policy_version)
        self.failed += [effect.line for effect in effects if isinstance(effect, Failed)]

    def submit(self, n: int = 2, environment: str = "env", **options: Any) -> list[str]:
        self.groups += 1
        self.bounds[f"g{self.groups}"] = options.get("max_lag")
        spec = GroupSpec(f"g{self.groups}", f"task-{self.groups}", f"digest-{self.groups}", environment)
        return self.apply(Submitted(t=self.t, groups=[spec], n=n, **options))[0][2]

    def lease(self, stage: str, member: str = "m1", free: int = 100, warm: frozenset[str] = frozenset()) -> list[Lease]:
        work = grants.choose(self.ledger, stage, free, warm)
        return self.apply(Leased(t=self.t, member=member, stage=stage, work=work)) if work else []

    def commit(self, lease: Lease, outcome: str = "ok", member: str | None = None, **fields: Any) -> str:
        given: dict[str, Any] = {"init": {"layer": f"sha256:{lease.work}"}, "run": {"segment": SEGMENT},
                                 "eval": {"row": ROW, "reward": 1.0, "chains": 1}}[lease.stage]  # fmt: skip
        item = CommitItem(lease=lease.id, outcome=outcome, **({**given, **fields} if outcome != "given_back" else {}))
        return self.apply(Committed(t=self.t, member=member or lease.member, commits=[item]))[0]

    def keep(self, lease: Lease, place: CheckpointRange, *, over: bool = False) -> str:
        """Commit a checkpoint; `over` gives the lease back with it."""
        outcome = "given_back" if over else "checkpoint"
        item = CommitItem(lease=lease.id, outcome=outcome, checkpoint=place)
        return self.apply(Committed(t=self.t, member=lease.member, commits=[item]))[0]

    def through(self, stage: str, outcome: str = "ok", **fields: Any) -> list[str]:
        return [self.commit(lease, outcome, **fields) for lease in self.lease(stage)]

    def pass_time(self, seconds: float, gap_s: float = 0.0) -> None:
        self.t += seconds
        self.apply(Tick(t=self.t, gap_s=gap_s))

    def gone(self, member: str) -> int:
        return self.apply(MemberGone(t=self.t, member=member))

    def cancel(self, *, rollouts: list[str] | None = None, groups: list[str] | None = None) -> int:
        return self.apply(Cancelled(t=self.t, rollouts=rollouts or [], groups=groups or []))

    @property
    def rows(self) -> list[RowsLine]:
        return [line for line in self.lines if isinstance(line, RowsLine)]

    @property
    def group_lines(self) -> list[GroupLine]:
        return [line for line in self.lines if isinstance(line, GroupLine)]


def check_invariants(driven: Driven) -> None:
    """What holds after every event, whatever came before."""
    state, queues = driven.ledger.state, driven.ledger.queues
    counts = state.counts
    assert [line.seq for line in driven.lines] == list(range(1, state.seq + 1))
    ended = Counter(line.rollout_id for line in driven.rows)
    assert not ended or max(ended.values()) == 1
    assert not ended.keys() & state.rollouts.keys()
    assert counts.accepted == counts.completed + counts.failed + counts.cancelled + len(state.rollouts)
    assert counts.accepted == len(ended) + len(state.rollouts)
    assert counts.groups_accepted == counts.groups_closed + len(state.groups)

    held = Counter((lease.stage, lease.work) for lease in state.leases.values())
    assert not held or max(held.values()) == 1
    for lease in state.leases.values():
        assert lease.id in state.members[lease.member]
    for leases in state.members.values():
        assert all(lease in state.leases for lease in leases)
    delayed = {(stage, work) for _, _, stage, work in state.delayed}
    for rollout in state.rollouts.values():
        places = [
            rollout.lease in state.leases,
            any(rollout.id in queue for queue in queues.by_stage.values()),
            rollout.id in queues.held,
            (rollout.stage, rollout.id) in delayed and rollout.state == "queued",
            rollout.id in state.environments[state.groups[rollout.group].environment].waiting,
            rollout.graded is not None,
        ]
        assert sum(places) >= 1, f"{rollout} is nowhere: it would never end"
        assert sum(places[:3]) + sum(places[4:]) <= 1, f"{rollout} is in two places: it could run twice"
        assert rollout.tries < state.rules.max_attempts
    needed = [r.segment.path for r in state.rollouts.values() if r.segment]
    needed += [r.checkpoint.path for r in state.rollouts.values() if r.checkpoint]
    assert dict(state.segments) == Counter(needed)
    for environment in state.environments.values():
        if environment.layer is None and environment.waiting and not environment.lease:
            assert environment.key in queues.by_stage["init"] or ("init", environment.key) in delayed
    assert len(queues.by_stage["run"]) <= state.rules.ready_buffer + counts.retries + counts.infra_failures
    for group in state.groups.values():
        assert group.open == sum(r in state.rollouts for r in group.rollouts)
    in_flight = Counter(session.replica for session in state.fleet.sessions.values())
    for replica in state.fleet.replicas.values():
        assert replica.in_flight == in_flight[replica.id]
    for line in driven.group_lines:
        mine = [row for row in driven.rows if row.group_id == line.group_id]
        assert [row.rollout_id for row in mine].sort() == line.rollout_ids.sort()
        assert line.usable == sum(not row.mask_sample for row in mine)
        _within_bound(driven, line, [row for row in mine if row.shard is not None])


def _within_bound(driven: Driven, line: GroupLine, named: list[RowsLine]) -> None:
    """Where a group has a lag bound, every row that the index names was within it when its group closed."""
    max_lag, version = driven.at_close[line.group_id]
    for row in named:
        oldest = row.min_policy_version
        assert max_lag is None or oldest is None or version - oldest <= max_lag, row
