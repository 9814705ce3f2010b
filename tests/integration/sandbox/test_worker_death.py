"""kill -9 of a worker: its processes, mounts and scratch directories go with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.sandbox.grounds import alive, wait_until

REPOSITORY = Path(__file__).resolve().parents[3]

_WORKER = """
import asyncio, sys
from pathlib import Path
from tests.integration.sandbox.grounds import backend_named
from sandbox.protocols import SandboxSpec

async def main():
    backend = backend_named(sys.argv[1], Path(sys.argv[2]))
    sandboxes = [backend.create(SandboxSpec()) for _ in range(3)]
    for one in sandboxes:
        await one.shell.run("mkdir -p deep/er; chmod 000 deep/er; touch f; chmod 000 deep")
        await one.shell.run("(setsid sh -c 'trap : TERM HUP INT; sleep 300; sleep 300' >/dev/null 2>&1 &); sleep 300 &")
    running = [asyncio.create_task(one.shell.run("sleep 300", 300)) for one in sandboxes]
    print("ready", flush=True)
    await asyncio.gather(*running)

asyncio.run(main())
"""


def descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def mounts_naming(text: str) -> list[str]:
    found = []
    for mounts in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):
            if text in mounts.read_text():
                found.append(str(mounts))
    return found


@pytest.mark.parametrize("name", ["bubblewrap", "none"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_worker(name: str, number: signal.Signals, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", _WORKER, name, str(scratch)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        family = descendants(worker.pid)
        assert len(family) > 9 and len(list(scratch.iterdir())) == 1
        if name == "bubblewrap":
            assert mounts_naming(str(scratch))
        worker.send_signal(number)
        worker.wait(10.0)
    wait_until("every process has gone", lambda: not any(alive(pid) for pid in family))
    wait_until("the scratch directory is empty", lambda: list(scratch.iterdir()) == [])
    assert mounts_naming(str(scratch)) == []


def test_a_killed_spawner_takes_its_sandboxes_along(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", _WORKER, "bubblewrap", str(tmp_path / "scratch")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        (spawner,) = [
            pid for pid in descendants(worker.pid) if b"sandbox.spawner" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        family = descendants(spawner)
        os.kill(spawner, signal.SIGKILL)
        wait_until("every process has gone", lambda: not any(alive(pid) for pid in family))
        worker.kill()
