"""A run on the test cluster: submitted by the real command as an ordinary user, and what its files and Slurm say."""

from __future__ import annotations

import json
from typing import Any

from launch.slurm import record
from launch.slurm.record import Submission
from stages.journal.history import read_events
from stages.layout import RunLayout
from stages.ledger.events import Leased
from stages.ledger.machine import Ledger
from tests.support import runs
from tests.support.cluster import Cluster
from tests.support.waiting import poll

QUICK = ("lease.ttl_s=6", "lease.heartbeat_s=1")
"""Time-outs that do not make a test wait."""
TURNS = 8
SLOW = (
    "agent._target_=tests.support.agents.Steps", f"+agent.options.turns={TURNS}", "+agent.options.pause_s=0.4",
    "pools.run.slots=16", "sampling.max_tokens=12",
)  # fmt: skip
"""Rollouts of three seconds or more on any machine, until `go_on`; each step rests on the one before."""


class ClusterRun:
    """One run of alice's, by default the demo's 64 sums of 4 rollouts each; `slow`: it takes its time until `go_on`."""

    def __init__(
        self, cluster: Cluster, name: str, *overrides: str, user: str = "alice", groups: int = 64, slow: bool = False
    ) -> None:
        self.cluster, self.user, self.expected = cluster, user, groups * 4
        self.place = cluster.share(user) / name
        self.layout = RunLayout(self.place)
        self._go = cluster.share(user) / f"{name}.go"
        pace = [*SLOW, f"+agent.options.go={self._go}"] if slow else []
        self._words = ["experiment=demo", f"run_dir={name}", f"task.limit={groups}", *QUICK, *pace, *overrides]

    def submit(self, *more: str) -> ClusterRun:
        """Submit it; it must be accepted."""
        ended = self.cluster.rollmill(self.user, *self._words, *more)
        assert ended.returncode == 0, ended.stderr or ended.stdout
        return self

    def go_on(self) -> None:
        """What was to happen in the middle of it has happened: from here on its rollouts lose no time."""
        self._go.touch()

    def verb(self, name: str, *options: str) -> str:
        """What `rollmill NAME RUN_DIR` prints; it must succeed."""
        ended = self.cluster.rollmill(self.user, name, str(self.place), *options)
        assert ended.returncode == 0, ended.stderr or ended.stdout
        return ended.stdout

    def status(self) -> dict[str, Any]:
        """`rollmill status --json`."""
        found: dict[str, Any] = json.loads(self.verb("status", "--json"))
        return found

    @property
    def submissions(self) -> list[Submission]:
        """What the run's own record says."""
        return record.read(self.layout)

    @property
    def submitted(self) -> list[Submission]:
        """The same, with what the run has withdrawn meanwhile: `auto` may do so while its command still comes back."""
        return record.read(self.layout, forgotten=True)

    @property
    def job(self) -> str:
        """The id of the newest job that holds the router."""
        return [one.job_id for one in self.submissions if one.control][-1]

    def rows(self) -> int:
        """Rollouts that are published."""
        return len(runs.rows(self.place)) if (self.place / "index").exists() else 0

    def await_rows(self, count: int, timeout_s: float = 90) -> None:
        """Wait until so many rollouts are published."""
        poll(lambda: self.rows() >= count, f"{count} rows of {self.place.name}", timeout_s, 0.2)

    def state(self) -> str:
        """What the summary says; empty while there is none."""
        try:
            return str(json.loads(self.layout.summary.read_text())["state"])
        except FileNotFoundError:
            return ""

    def await_state(self, *wanted: str, timeout_s: float = 300) -> None:
        """Wait for the summary of an end."""
        try:
            poll(lambda: self.state() in wanted, f"{self.place.name} is {' or '.join(wanted)}", timeout_s, 0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {self.state()!r}: {self.said()}") from None

    def said(self) -> str:
        """The last words of every log, for a failure's message."""
        logs = [*self.layout.slurm.glob("*.out"), *self.place.glob("logs/*/*.log")]
        return "\n".join(f"{log.name}: {' | '.join(log.read_text().splitlines()[-3:])}" for log in sorted(logs))

    def exactly_once(self) -> None:
        """Every rollout has one line, and all of them were completed."""
        runs.exactly_once(self.place, self.expected)
        assert runs.summary(self.place)["rollouts"]["completed"] == self.expected

    def await_slurm(self, job: str, *wanted: str, timeout_s: float = 60) -> None:
        """Wait until accounting, which lags, gives each component of a job one of these states."""

        def there() -> bool:
            states = {name: state for name, state in self.cluster.states(job).items() if "." not in name}
            return bool(states) and set(states.values()) <= set(wanted)

        poll(there, f"job {job} is {' or '.join(wanted)} in sacct", timeout_s, 0.3)

    def gone(self) -> None:
        """No process of any job is left on any node."""
        self.cluster.await_no_processes()


def wasted_tokens(run: ClusterRun) -> int:
    """Tokens that were sampled and are in no row, as the ledger counts them."""
    return runs.replayed(run.place).state.counts.wasted_tokens


def attempts(run: ClusterRun) -> int:
    """Most attempts that any rollout needed in RUN."""
    ledger, seen = Ledger(), dict[str, int]()
    for event in read_events(run.layout):
        ledger.apply(event)
        if isinstance(event, Leased) and event.stage == "run":
            for lease in event.leases:
                seen[lease.work] = max(seen.get(lease.work, 0), lease.attempt)
    return max(seen.values(), default=0)
