"""Readings of engines, the gate on full ones, and the limit on RUN, over recorded traces."""

from __future__ import annotations

from stages.router.flow import CUT, FLOOR, SETTLE_LOOKS, Flow
from stages.router.readings import FIRST_REST_S, Pressure, Reading, reading_of


def full(**changes: float) -> Reading:
    return Reading(**{"running": 8.0, "waiting": 3.0, "kv_usage": 0.97, **changes})


def test_figures_are_taken_by_vllms_names() -> None:
    samples = {"vllm:num_requests_running": 3.0, "vllm:kv_cache_usage_perc": 0.25, "vllm:prefix_cache_hits_total": 30.0,
               "vllm:prefix_cache_queries_total": 40.0, "process_cpu_seconds_total": 9.0}  # fmt: skip
    reading = reading_of(samples)
    assert reading is not None and (reading.running, reading.kv_usage, reading.hit_ratio) == (3.0, 0.25, 0.75)
    assert reading_of({"process_cpu_seconds_total": 9.0}) is None


def test_a_full_replica_is_avoided_until_it_has_rested_and_has_room() -> None:
    pressure = Pressure(0.9)
    pressure.read("r0", full(), 10, 100.0)
    pressure.read("r1", Reading(running=2.0, kv_usage=0.1), 10, 100.0)
    assert pressure.avoided(100.0) == {"r0"} and pressure.over(100.0) == {"r0"}
    pressure.read("r0", Reading(running=1.0, kv_usage=0.2), 2, 102.0)
    assert pressure.avoided(102.0) == {"r0"}
    assert pressure.avoided(100.0 + FIRST_REST_S + 1) == frozenset()


def test_each_relapse_doubles_the_rest() -> None:
    pressure, now, rests = Pressure(0.9), 0.0, []
    for _ in range(4):
        pressure.read("r0", full(), 10, now)
        began = now
        while "r0" in pressure.over(now):
            now += 0.5
        rests.append(now - began)
        pressure.read("r0", Reading(kv_usage=0.1), 1, now)
        now += 1.0
    assert rests == [5.0, 10.0, 20.0, 40.0]


def test_a_preemption_is_pressure_whatever_the_cache_says_and_an_old_one_is_not() -> None:
    pressure = Pressure(0.9)
    pressure.read("r0", Reading(preemptions=7.0), 4, 0.0)
    assert pressure.over(0.0) == frozenset()
    pressure.read("r0", Reading(preemptions=8.0), 4, 2.0)
    assert pressure.over(2.0) == {"r0"}


def test_between_two_looks_no_more_sessions_go_than_fit_below_the_gate() -> None:
    pressure = Pressure(0.9)
    pressure.read("r0", Reading(running=10.0, kv_usage=0.6), 10, 0.0)
    taken = 0
    while "r0" not in pressure.avoided(0.0):
        pressure.opened("r0")
        taken += 1
    assert taken == 5  # 0.06 of the cache each, 0.3 left


def test_without_a_gate_nobody_is_avoided() -> None:
    pressure = Pressure(1.0)
    pressure.read("r0", full(kv_usage=1.0), 10, 0.0)
    assert pressure.avoided(0.0) == frozenset() and pressure.over(0.0) == frozenset()


# Recorded at the embedded engine with 8 MiB of cache, every third look: 6 conversations, then 48, then 8. Running,
# waiting, share of the cache in use, preemptions, conversations.
TRACE = [
    (0, 0, 0.0, 0, 6), (5, 0, 0.309, 0, 6), (4, 0, 0.336, 0, 6), (4, 0, 0.461, 0, 4), (40, 2, 0.77, 0, 48),
    (33, 9, 0.926, 0, 48), (24, 10, 0.977, 2, 48), (22, 19, 0.969, 2, 48), (20, 22, 0.914, 5, 48),
    (19, 27, 0.973, 8, 48), (15, 26, 0.891, 8, 48), (15, 31, 0.969, 9, 48), (14, 31, 0.953, 12, 48),
    (15, 31, 1.0, 14, 48), (15, 29, 0.992, 17, 46), (13, 32, 0.934, 19, 46), (11, 32, 0.863, 20, 46),
    (12, 31, 0.965, 22, 46), (7, 9, 0.898, 54, 16), (8, 2, 0.891, 57, 12), (6, 0, 0.777, 60, 8), (4, 0, 0.195, 60, 8),
    (7, 0, 0.484, 60, 7), (4, 0, 0.375, 60, 7), (6, 0, 0.695, 60, 7),
]  # fmt: skip


def test_a_recorded_trace_is_cut_down_to_what_the_engine_could_run_and_grown_again() -> None:
    flow, said, limits = Flow(), [], []
    for running, waiting, kv_usage, preemptions, rollouts in TRACE:
        reading = Reading(running, waiting, kv_usage, 0.0, 0.0, preemptions)
        # More is wanted all the time, so RUN holds as many as it may, whatever the recording held.
        held = rollouts if flow.limit is None else flow.limit
        said.append(flow.look({"r0": reading}, held, wanted=100))
        limits.append(flow.limit)
    assert set(said[:6]) == {"hold"} and limits[5] is None
    assert "cut" in said[6:20] and "grow" not in said[6:20] and "cut" not in said[21:]
    assert limits[17] is not None and 6 <= limits[17] <= 16  # it ran 11 to 15 without queueing
    assert said[21:].count("grow") >= 1


def test_a_cut_is_of_what_ran_and_not_repeated_before_it_shows() -> None:
    flow = Flow()
    readings = [{"r0": Reading(running=40.0, kv_usage=0.95, preemptions=float(count))} for count in range(9)]
    flow.look(readings[0], 40, 10)
    assert [flow.look(reading, 40, 10) for reading in readings[1 : 2 + SETTLE_LOOKS]].count("cut") == 2
    assert flow.limit == int(int(40 * CUT) * CUT) and flow.room(20) == flow.limit - 20 and flow.room(99) == 0


def test_it_never_cuts_an_engine_idle_and_never_limits_without_a_reason() -> None:
    flow = Flow()
    for count in range(50):
        flow.look({"r0": Reading(preemptions=float(count))}, 5, 0)
    assert flow.limit == FLOOR
    calm = Flow()
    for _ in range(10):
        calm.look({"r0": Reading(running=50.0, kv_usage=0.99)}, 50, 50)
    assert calm.limit is None and calm.room(10_000) > 10_000


def test_a_replica_that_starts_anew_counts_from_nothing() -> None:
    flow = Flow()
    flow.look({"r0": Reading(preemptions=90.0)}, 8, 0)
    assert flow.look({"r0": Reading(preemptions=0.0)}, 8, 0) == "hold"
    assert flow.look({"r1": Reading(preemptions=5.0)}, 8, 0) == "hold"
