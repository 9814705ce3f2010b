"""Public bugs of the field that are bugs of processes: real runs by the real command."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import urllib.request
from collections import Counter
from pathlib import Path

from stages import control
from stages.client import RolloutClient
from stages.errors import ServiceError
from stages.journal.history import read_events
from stages.layout import RunLayout
from stages.ledger.events import Leased
from tests.integration.sandbox.test_worker_death import mounts_naming
from tests.support import runs

SLOW = ("agent._target_=tests.support.agents.Steps", "+agent.options.turns=3", "+agent.options.pause_s=0.1")
SHORT_LEASES = ("lease.ttl_s=4.0", "lease.heartbeat_s=1.0")
SEED = 8
CANCELS = 5


def in_mid_run(run_dir: Path, lines: int) -> list[int]:
    """The pids of the run's processes once its index has so many lines."""
    runs.poll(lambda: (run_dir / "index").is_dir() and len(runs.index(run_dir)) >= lines, f"{lines} index lines")
    return [member["pid"] for member in runs.members(run_dir)]


def test_b03_sigterm_to_everything_in_mid_run_and_then_a_requeue(tmp_path: Path) -> None:
    """As a batch system ends a job: every process gets the signal at once; the same command then goes on."""
    run_dir = tmp_path / "run"
    overrides = ("task.limit=8", "group_size=4", "pools.run.slots=8", *SHORT_LEASES, *SLOW)
    with runs.running(run_dir, *overrides) as process:
        for pid in in_mid_run(run_dir, 4):
            os.kill(pid, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    assert process.returncode not in (0, 1)
    before = len(runs.rows(run_dir))
    assert {row["status"] for row in runs.rows(run_dir)} == {"completed"} and before < 32
    again = runs.run(run_dir, *overrides)
    assert again.returncode == 0, again.stderr
    runs.exactly_once(run_dir, 32)
    counts = runs.replayed(run_dir).state.counts
    assert (counts.completed, counts.failed, counts.cancelled) == (32, 0, 0)
    assert (run_dir / "failures.jsonl").read_text() == ""
    leases = Counter(work for event in read_events(RunLayout(run_dir)) if isinstance(event, Leased)
                     and event.stage == "run" for work in event.work)  # fmt: skip
    assert max(leases.values()) <= 2, "a killed rollout ran more than once again"
    # B5: the logs of the superseded attempt are where they were.
    for attempt in ("attempt_1", "attempt_2"):
        assert {path.name for path in (run_dir / "logs" / attempt).iterdir()} >= {"router-1.log", "run-1.log"}


def test_b08_runs_cancelled_at_random_points_leave_nothing_behind(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    for number in range(CANCELS):
        run_dir, scratch = tmp_path / f"run-{number}", tmp_path / f"scratch-{number}"
        overrides = ("task.limit=32", "group_size=4", f"cluster.scratch={scratch}", *SLOW)
        with runs.running(run_dir, *overrides) as process:
            pids = set(in_mid_run(run_dir, draw.randrange(0, 12)))
            _cancel_some(run_dir, draw)
            pids.update(member["pid"] for member in runs.members(run_dir))
            url = json.loads((run_dir / "router.json").read_text())["url"]
            token = (run_dir / "secrets" / "trainer.token").read_text().strip()
            assert answers(url, token)
            if number == 0:
                assert runs.verb("cancel", run_dir).returncode == 0
            else:
                control.request(run_dir, "cancel")  # what the verb does, without its second to start
            _, errors = process.communicate(timeout=300)
        assert process.returncode == 130, errors
        assert runs.alive(sorted(pids)) == [] and runs.members(run_dir) == []
        assert not answers(url, token)
        assert mounts_naming(str(scratch)) == []
        left = [
            path for path in scratch.rglob("*") if path.is_dir() and path.name.startswith(("run-", "eval-", "init-"))
        ]
        assert left == [] and not [path for path in run_dir.rglob("*") if path.suffix == ".tmp"]
        ledger = runs.replayed(run_dir)
        assert not ledger.state.rollouts and not ledger.state.leases
        runs.exactly_once(run_dir, ledger.state.counts.accepted)


def answers(url: str, token: str) -> bool:
    """Whether this run's router is there; its port may be another's by now."""
    request = urllib.request.Request(f"{url}/v1/policy", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10):
            return True
    except (OSError, http.client.HTTPException):
        return False


def _cancel_some(run_dir: Path, draw: random.Random) -> None:
    """A few rollouts and groups by the API, wherever they are; those that have ended, or were not sent yet, say so."""
    with RolloutClient(run_dir) as client:
        for _ in range(4):
            group = f"g{draw.randrange(1, 33):06d}"
            try:
                if draw.random() < 0.5:
                    client.cancel(group_id=group)
                else:
                    client.cancel(rollout_id=f"{group}-{draw.randrange(4)}")
            except ServiceError as error:
                assert error.status in {404, 409}, error


def test_b39_a_run_in_which_nothing_progresses_ends_and_says_what_it_waits_for(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    nobody = ("fleet=external", "fleet.urls=[http://127.0.0.1:9]", "fleet.model=tiny")
    result = runs.run(run_dir, "task.limit=2", "group_size=2", "stuck_after_s=8.0", "pools.run.slots=3", *nobody)
    assert result.returncode == 1, result.stderr
    last = result.stderr.splitlines()[-1]
    assert "nothing has progressed for" in last and "run 1 queued and 3 leased" in last
    assert "0 of 1 replicas ready" in last
    assert runs.members(run_dir) == []
