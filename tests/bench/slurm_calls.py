"""What a run costs slurmctld, by its own count of each user's calls: fixed, a minute, and a rollout."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from stages.journal.history import read_events
from stages.ledger.events import Leased
from tests.bench.report import emit
from tests.slurm.jobs import ClusterRun
from tests.support.cluster import Cluster, ClusterError

USER = "alice"
FIRST_LEASE_S = 5.0
PER_SUBMISSION, PER_STEP, PER_ESTIMATE = 4, 3, 1
"""The budget of calls: once, for each step, and for each component that `sbatch --test-only` is asked about."""
SUBMITIT = """
import sys, time, submitit
executor = submitit.SlurmExecutor("submitit")
executor.update_parameters(time=10, cpus_per_task=1, use_srun=False)
executor.submit(time.sleep, float(sys.argv[1])).result()
"""


@dataclass(frozen=True)
class Cost:
    """Calls of one run.

    `total` from the submission until all is gone; `while_running` in the `minutes` in which rollouts were published;
    `database` is what slurmdbd served in all; `first_lease_s` from Slurm's start of the
    job to the first lease that a worker got (Slurm tells its start in whole seconds).
    """

    rollouts: int
    components: int
    total: int
    while_running: int
    minutes: float
    database: int
    first_lease_s: float


class Counter:
    """The user's calls since the last reset; asking costs root's calls alone."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        cluster.settle()
        cluster.reset_rpcs()

    def controller(self) -> int:
        return self._cluster.rpcs().users.get(USER, 0)

    def database(self) -> int:
        return self._cluster.database_rpcs().users.get(USER, 0)


def of_run(cluster: Cluster, groups: int) -> Cost:
    """Submit the demo with so many groups of four as a het job of five components, and leave it alone."""
    counter = Counter(cluster)
    run = ClusterRun(cluster, f"calls{groups}", "placement=het", groups=groups, user=USER).submit()
    run.await_rows(1, 120)
    began, before = time.monotonic(), counter.controller()
    run.await_rows(int(run.expected * 0.9), 900)
    minutes, running = (time.monotonic() - began) / 60, counter.controller() - before
    run.await_state("completed", timeout_s=300)
    cluster.await_state(run.job, "COMPLETED")
    run.exactly_once()
    components = len(cluster.queued(run.job))
    cluster.await_no_processes()
    calls, database = counter.controller(), counter.database()
    return Cost(run.expected, components, calls, running, minutes, database, first_lease_s(cluster, run))


def first_lease_s(cluster: Cluster, run: ClusterRun) -> float:
    """Seconds from Slurm's start of the run's job to its first lease."""
    said = cluster.run("root", ["sacct", "-XnPj", run.job, "-o", "Start"], env={"SLURM_TIME_FORMAT": "%s"}, check=True)
    first = next(event.t for event in read_events(run.layout) if isinstance(event, Leased))
    return first - float(said.stdout.split()[0])


def of_submitit(cluster: Cluster, seconds: int) -> dict[str, float]:
    """A plain job of so many seconds with submitit's own waiting."""
    counter = Counter(cluster)
    command = [str(cluster.python), "-P", "-c", SUBMITIT, str(seconds)]
    cluster.run(USER, command, timeout_s=seconds + 300, check=True)
    return {"rpcs_fixed": counter.controller(), "database_rpcs_per_min": counter.database() / seconds * 60}


def figures(small: Cost, large: Cost) -> dict[str, float]:
    """The benchmark's figures, from two runs that differ in their number of rollouts alone."""
    minutes = small.minutes + large.minutes
    per_minute = (small.while_running + large.while_running) / minutes
    return {
        "rpcs_fixed": small.total,
        "rpcs_fixed_budget": PER_SUBMISSION + (PER_STEP + PER_ESTIMATE) * small.components,
        "rpcs_per_min": per_minute,
        "rpcs_per_rollout": (large.total - small.total) / (large.rollouts - small.rollouts),
        "rollouts_small": small.rollouts,
        "rollouts_large": large.rollouts,
        "components": small.components,
        "minutes_watched": minutes,
        "database_rpcs": large.database,
        "first_lease_s": min(small.first_lease_s, large.first_lease_s),
    }


def complaints(found: dict[str, float]) -> list[str]:
    """Where the budget was not kept."""
    said = []
    if found["rpcs_fixed"] > found["rpcs_fixed_budget"]:
        said.append(f"{found['rpcs_fixed']:.0f} calls for a run, above the budget of {found['rpcs_fixed_budget']:.0f}")
    if found["rpcs_per_min"] > 0.5:
        said.append(f"{found['rpcs_per_min']:.2f} calls a minute while rollouts run, above 0.5")
    if found["rpcs_per_rollout"] > 0:
        said.append(f"{found['rpcs_per_rollout']:.4f} calls a rollout, which should be none")
    if found["first_lease_s"] > FIRST_LEASE_S:
        said.append(f"{found['first_lease_s']:.1f} s from Slurm's start to the first lease, above {FIRST_LEASE_S:.0f}")
    return said


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="few rollouts, to see that it works")
    given = parser.parse_args(arguments)
    sizes, seconds = ((4, 16), 20) if given.quick else ((64, 640), 180)
    found: dict[str, float] = {}
    peers: dict[str, dict[str, float]] = {}
    try:
        with Cluster() as cluster:
            found = figures(*(of_run(cluster, groups) for groups in sizes))
            peers["submitit_wait"] = of_submitit(cluster, seconds)
            errors = complaints(found)
    except (ClusterError, AssertionError) as error:
        errors = [str(error)]
    return emit("slurm_calls", found, peers=peers, errors=errors, as_json=given.json)


if __name__ == "__main__":
    raise SystemExit(main())
