"""/metrics: Prometheus text of what the router knows; no label per rollout."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from stages.ledger.outcomes import OUTCOMES
from stages.router.core import Router
from stages.router.readings import Reading
from stages.router.views import stages_view

LATEST: Final = 4096
"""Durations that quantiles are taken of."""


class Seconds:
    """Durations of one kind: all of them counted and added up, the latest kept."""

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0
        self.latest: deque[float] = deque(maxlen=LATEST)

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self.total += seconds
        self.latest.append(seconds)


def render(
    router: Router, readings: Mapping[str, Reading] | None = None, loads: Mapping[str, Mapping[str, Any]] | None = None,
    stages: Mapping[str, Seconds] | None = None,
) -> str:  # fmt: skip
    """The exposition, one scrape.

    Args:
        router: whose ledger is told.
        readings: the last look at each replica.
        loads: what each worker said of itself at its last heartbeat.
        stages: service time of the attempts that ended, by stage.
    """
    lines = [*_lines(router), *_stages(stages or {}), *_fleet(readings or {}), *_workers(loads or {})]
    return "\n".join(lines) + "\n"


def _stages(stages: Mapping[str, Seconds]) -> Iterator[str]:
    yield "# TYPE rollmill_stage_seconds summary"
    for stage, spent in stages.items():
        for quantile, value in _quantiles(spent.latest):
            yield f'rollmill_stage_seconds{{stage="{stage}",quantile="{quantile}"}} {value:.6f}'
        yield f'rollmill_stage_seconds_sum{{stage="{stage}"}} {spent.total:.6f}'
        yield f'rollmill_stage_seconds_count{{stage="{stage}"}} {spent.count}'


def _fleet(readings: Mapping[str, Reading]) -> Iterator[str]:
    yield "# TYPE rollmill_prefix_cache_hit_ratio gauge"
    for replica, reading in readings.items():
        yield f'rollmill_prefix_cache_hit_ratio{{replica="{replica}"}} {reading.hit_ratio:g}'
    yield "# TYPE rollmill_replica_kv_usage gauge"
    for replica, reading in readings.items():
        yield f'rollmill_replica_kv_usage{{replica="{replica}"}} {reading.kv_usage:g}'


def _workers(loads: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The worst of each stage: a worker's own label would be new with every incarnation."""
    worst: dict[str, float] = {}
    for member, load in loads.items():
        stage = member.partition("-")[0]
        worst[stage] = max(worst.get(stage, 0.0), float(load.get("loop_lag_s", 0.0)))
    yield "# TYPE rollmill_worker_loop_lag_seconds gauge"
    for stage, lag_s in worst.items():
        yield f'rollmill_worker_loop_lag_seconds{{stage="{stage}"}} {lag_s:g}'


def _lines(router: Router) -> Iterator[str]:
    state = router.ledger.state
    yield "# TYPE rollmill_rollouts_total counter"
    for outcome, count in sorted(state.counts.by_class.items()):
        yield f'rollmill_rollouts_total{{status="{OUTCOMES[outcome].status}",class="{outcome}"}} {count}'
    stages = stages_view(router.ledger)
    for kind in ("queued", "leased"):
        yield f"# TYPE rollmill_stage_{kind} gauge"
        for stage, view in stages.items():
            yield f'rollmill_stage_{kind}{{stage="{stage}"}} {view[kind]}'
    counts = state.counts
    yield "# TYPE rollmill_reward summary"
    yield f"rollmill_reward_sum {counts.reward_sum:g}"
    yield f"rollmill_reward_count {counts.reward_n}"
    yield "# TYPE rollmill_tokens_total counter"
    yield f'rollmill_tokens_total{{kind="sampled"}} {counts.tokens}'
    yield "# TYPE rollmill_sessions gauge"
    for replica in state.fleet.replicas.values():
        yield f'rollmill_sessions{{replica="{replica.id}"}} {replica.in_flight}'
    yield "# TYPE rollmill_policy_version gauge"
    yield f"rollmill_policy_version {state.policy_version}"
    yield "# TYPE rollmill_infra_failure_ratio gauge"
    yield f"rollmill_infra_failure_ratio {counts.infra_failures / max(1, counts.attempts_ended):g}"
    yield from _summary("rollmill_event_loop_lag_seconds", router.lag_s)
    yield from _summary("rollmill_journal_fsync_seconds", router.journal.fsync_s)


def _summary(name: str, samples: Sequence[float]) -> Iterator[str]:
    yield f"# TYPE {name} summary"
    for quantile, value in _quantiles(samples):
        yield f'{name}{{quantile="{quantile}"}} {value:.6f}'
    yield f"{name}_count {len(samples)}"


def _quantiles(samples: Iterable[float]) -> Iterator[tuple[float, float]]:
    if ordered := sorted(samples):
        for quantile in (0.5, 0.99):
            yield quantile, ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
