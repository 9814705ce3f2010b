"""The RUN pool's controller: grows with the queue, waits for what it asked for, ends what idles, keeps its bounds."""

from __future__ import annotations

from typing import Any

from conf.schema import Autoscale
from launch.slurm.autoscale import SETTLE_S, Added, Controller, Grow, Shrink

KEYS = Autoscale(max=4, queue=10, idle_s=60.0)


def status(queued: int, leases: dict[int, int]) -> dict[str, Any]:
    """A router's status with these RUN workers and what each holds."""
    members = [{"id": f"run-{number}-abc123", "kind": "run", "leases": held} for number, held in leases.items()]
    return {"stages": {"run": {"queued": queued, "leased": sum(leases.values())}}, "members": members}


def test_a_long_queue_asks_for_one_job_and_waits_until_its_workers_are_there() -> None:
    controller = Controller(KEYS, step=2)
    assert controller.decide(0.0, status(11, {1: 4}), [], 9) == Grow(2)
    added = [Added("7", 2, 2)]
    later = 10 * SETTLE_S
    assert controller.decide(later, status(500, {1: 4}), added, 9) is None, "it has not started yet"
    assert controller.decide(later, status(500, {1: 4, 2: 4, 3: 4}), added, 9) == Grow(2)


def test_a_short_queue_a_full_pool_or_a_spent_hour_asks_for_nothing() -> None:
    assert Controller(KEYS, step=2).decide(0.0, status(10, {1: 4}), [], 9) is None
    full = [Added("7", 2, 4)]
    assert Controller(KEYS, step=2).decide(0.0, status(500, dict.fromkeys(range(1, 6), 4)), full, 9) is None
    assert Controller(KEYS, step=2).decide(0.0, status(500, {1: 4}), [], 0) is None


def test_never_more_than_the_maximum() -> None:
    there = [Added("7", 2, 3)]
    assert Controller(KEYS, step=8).decide(0.0, status(500, dict.fromkeys(range(1, 5), 4)), there, 9) == Grow(1)


def test_an_added_job_ends_when_all_its_workers_were_idle_for_long_enough() -> None:
    controller, added = Controller(KEYS, step=2), [Added("7", 2, 2)]
    idle, busy = {1: 4, 2: 0, 3: 0}, {1: 4, 2: 0, 3: 1}
    assert controller.decide(0.0, status(0, idle), added, 9) is None
    assert controller.decide(50.0, status(0, busy), added, 9) is None, "one of them works: counted anew"
    assert controller.decide(60.0, status(0, idle), added, 9) is None
    assert controller.decide(119.0, status(0, idle), added, 9) is None
    assert controller.decide(120.0, status(0, idle), added, 9) == Shrink("7")


def test_workers_of_the_placement_are_never_ended() -> None:
    controller = Controller(KEYS, step=2)
    for now in (0.0, 100.0, 200.0):
        assert controller.decide(now, status(0, {1: 0}), [], 9) is None


def test_nobody_waits_for_the_rest_of_a_job_that_lost_a_node() -> None:
    there = {1: 4, 2: 4}
    assert Controller(KEYS, step=2).decide(0.0, status(500, there), [Added("7", 2, 2)], 9) is None
    assert Controller(KEYS, step=2).decide(0.0, status(500, there), [Added("7", 2, 2, settled=True)], 9) == Grow(2)
