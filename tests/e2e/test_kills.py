"""kill -9 of any process in the middle of a run: every rollout still ends, each once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from stages.journal.history import read_events
from stages.layout import RunLayout
from stages.ledger.events import Committed, EpochBegan
from tests.support import runs

TASKS, GROUP = 24, 4


@pytest.mark.parametrize("kind", ["router", "replica", "init", "run", "eval"])
def test_killing_one_process_in_mid_run_loses_and_doubles_nothing(tmp_path: Path, kind: str) -> None:
    run_dir = tmp_path / "run"
    with runs.running(run_dir, f"task.limit={TASKS}", f"group_size={GROUP}", "pools.run.slots=8") as process:

        def victim() -> int | None:
            if process.poll() is not None:
                raise AssertionError(f"the run ended before the kill: {process.communicate()}")
            begun = (run_dir / "index").is_dir() and len(runs.index(run_dir)) >= (0 if kind == "init" else 6)
            pids = [member["pid"] for member in runs.members(run_dir) if member["kind"] == kind]
            return pids[0] if begun and pids else None

        pid = runs.poll(victim, f"a {kind} in mid-run")
        os.kill(pid, signal.SIGKILL)
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert f"{TASKS * GROUP} completed" in output
    assert f"{kind}-1 ended with signal 9" in errors
    runs.exactly_once(run_dir, TASKS * GROUP)
    ledger = runs.replayed(run_dir)
    assert ledger.state.epoch == (2 if kind == "router" else 1)
    if kind == "router":
        events = list(read_events(RunLayout(run_dir)))
        began = next(event.t for event in events if isinstance(event, EpochBegan) and event.epoch == 2)
        first = min(event.t for event in events if isinstance(event, Committed) and event.t >= began)
        assert first - began <= 5.0, "the workers' results wait for the next router, and find it at once"


def test_killing_what_forks_the_processes_ends_them_all_and_they_come_back(tmp_path: Path) -> None:
    """It is their parent, so they get the signal that they asked for; another forks them anew."""
    run_dir = tmp_path / "run"
    with runs.running(run_dir, f"task.limit={TASKS}", f"group_size={GROUP}", "pools.run.slots=8") as process:

        def begun() -> list[int]:
            assert process.poll() is None, f"the run ended before the kill: {process.communicate()}"
            lines = len(runs.index(run_dir)) if (run_dir / "index").is_dir() else 0
            return [member["pid"] for member in runs.members(run_dir)] if lines >= 6 else []

        before = runs.poll(begun, "a run under way")
        forks = {parent for pid in before if (parent := _parent(pid)) != process.pid}
        assert len(forks) == 1, "router, init, run and eval have one parent, which is not the command"
        os.kill(forks.pop(), signal.SIGKILL)
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert f"{TASKS * GROUP} completed" in output
    runs.exactly_once(run_dir, TASKS * GROUP)
    assert runs.replayed(run_dir).state.epoch == 2
    assert not runs.alive(before)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_killed_run_is_carried_on_by_the_same_command_and_leaves_no_process(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    overrides = (f"task.limit={TASKS}", f"group_size={GROUP}", "lease.ttl_s=10", "lease.heartbeat_s=2")
    with runs.running(run_dir, *overrides) as process:
        runs.poll(lambda: (run_dir / "index").is_dir() and len(runs.index(run_dir)) >= 10, "ten lines")
        pids = [member["pid"] for member in runs.members(run_dir)]
        process.kill()
        process.communicate()
    runs.poll(lambda: not runs.alive(pids), "the processes end with their supervisor", 60)
    again = runs.run(run_dir, *overrides)
    assert again.returncode == 0, again.stderr
    runs.exactly_once(run_dir, TASKS * GROUP)
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == ["attempt_1", "attempt_2"]


def test_an_interrupt_drains_and_says_that_the_run_can_go_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    overrides = (f"task.limit={TASKS}", f"group_size={GROUP}")
    with runs.running(run_dir, *overrides) as process:
        runs.poll(lambda: (run_dir / "index").is_dir() and len(runs.index(run_dir)) >= 10, "ten lines")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "goes on from there" in errors.splitlines()[-1]
    assert runs.members(run_dir) == []
    again = runs.run(run_dir, *overrides)
    assert again.returncode == 0, again.stderr
    runs.exactly_once(run_dir, TASKS * GROUP)
