"""A task of a step: which processes it keeps on its node, what it hears, and what it leaves running at a drain."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.slurm.shapes import Share
from launch.slurm.step import slots_here
from stages.layout import RunLayout
from tests.support import runs
from tests.support.waiting import poll

KEEPS = """
    import os, sys
    from pathlib import Path
    from launch import supervisor
    from launch.slurm import step
    supervisor.BODY = "tests.unit.launch.slurm.body"
    step._sweep = lambda run_dir: None
    async def bury(self, member): pass  # nothing answers for a router here, and that would be waited for
    supervisor.Supervisor._bury = bury
    supervisor.RESTARTS = int(sys.argv[1])
    sys.exit(step.main(sys.argv[2:]))
"""
"""A step's task whose processes are tests.unit.launch.slurm.body: it says that it lives, and dies as it is told."""


class Task:
    """A task of a step as a process of its own, with the leader's end of its standard input."""

    def __init__(self, place: Path, name: str, *shares: str, restarts: int = 8) -> None:
        self.layout = RunLayout(place)
        self.layout.attempt_logs(1).mkdir(parents=True)
        self.layout.members.mkdir()
        words = [sys.executable, "-P", "-c", textwrap.dedent(KEEPS), str(restarts), str(place), name, *shares]
        environment = {**os.environ, "ROLLMILL_ATTEMPT": "1", "PYTHONPATH": str(runs.REPOSITORY)}
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def living(self) -> dict[str, int]:
        """Pids by the processes' names."""
        found = {path.name: int(path.read_text() or 0) for path in self.layout.root.glob("alive-*")}
        return {name.removeprefix("alive-"): pid for name, pid in found.items() if pid and runs.alive([pid])}

    def await_living(self, *names: str) -> dict[str, int]:
        return poll(lambda: self.living() if set(self.living()) == set(names) else {}, f"{names} live", 60)

    def end(self) -> tuple[int, str]:
        code = self.process.wait(timeout=60)  # `communicate` would close its standard input, which is a stop
        assert self.process.stderr is not None
        return code, self.process.stderr.read()

    def hang_up(self) -> None:
        """The leader goes: nothing more can be said."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> None:
        """End it, whatever it does, and what it would have left."""
        self.process.kill()
        self.process.wait()
        for pid in self.living().values():
            with contextlib.suppress(OSError):
                if str(self.layout.root).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    made = Task(tmp_path / "run", "all", "run=1,1-1", "replica=1,1-1")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("rank", "slots"),
    [
        ("0", [("run", 1), ("run", 2), ("replica", 1)]),
        ("1", [("run", 3), ("run", 4)]),
        ("2", [("run", 5)]),
        ("3", []),
    ],
)
def test_a_node_keeps_the_processes_of_its_rank(
    monkeypatch: pytest.MonkeyPatch, rank: str, slots: list[tuple[str, int]]
) -> None:
    monkeypatch.setenv("SLURM_PROCID", rank)
    assert slots_here(map(Share.parse, ["run=2,1-5", "replica=1,1-1"])) == slots


def test_a_drain_ends_the_workers_and_leaves_the_engines_until_the_stop(task: Task) -> None:
    task.await_living("run-1", "replica-1")
    task.say("drain")
    task.await_living("replica-1")
    task.say("stop")
    code, _ = task.end()
    assert code == 0 and task.living() == {}


def test_a_leader_that_is_gone_is_a_stop(task: Task) -> None:
    task.await_living("run-1", "replica-1")
    task.hang_up()
    code, _ = task.end()
    assert code == 0 and task.living() == {}
