"""What outlives worker and spawner both is ended by whoever sweeps, by the dead worker's own name and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.leftovers import OWNER, VARIABLE, end_carriers, identity, lives
from sandbox.scratch import OWNED, sweep
from tests.integration.sandbox.grounds import BACKENDS, alive, wait_until
from tests.integration.sandbox.test_worker_death import descendants, mounts_naming, spawner_of

REPOSITORY = Path(__file__).resolve().parents[3]

_WORKER = """
import asyncio, sys
from pathlib import Path
from sandbox.protocols import SandboxSpec
from sandbox.scratch import owned
from tests.integration.sandbox.grounds import backend_named

async def main():
    with owned(Path(sys.argv[2]), "run-") as scratch:
        async with backend_named(sys.argv[1], scratch) as backend, backend.create(SandboxSpec()) as sandbox:
            run = sandbox.shell.run
            await run("touch f; (setsid sh -c 'trap \\"\\" TERM HUP; sleep 300; sleep 300' &) ; sleep 300 &")
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@contextlib.contextmanager
def worker(name: str, base: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", _WORKER, name, str(base)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
        try:
            yield one
        finally:
            one.kill()


@pytest.mark.parametrize("name", BACKENDS)
def test_b36_a_sweep_ends_what_a_dead_worker_left_and_nothing_of_a_living_ones(name: str, tmp_path: Path) -> None:
    """Two workers of one user on one node, the same commands in both; one dies together with its spawner."""
    with worker(name, tmp_path) as dead, worker(name, tmp_path) as living:
        family, others = descendants(dead.pid), descendants(living.pid)
        spawner = spawner_of(dead.pid)
        for pid in (spawner, dead.pid):  # stopped first, so that neither clears up after the other
            os.kill(pid, signal.SIGSTOP)
        for pid in (spawner, dead.pid):
            os.kill(pid, signal.SIGKILL)
        dead.wait(60.0)
        wait_until("the spawner has gone", lambda: not alive(spawner))
        assert len(list(tmp_path.iterdir())) == 2
        assert sweep(tmp_path) == 1
        try:
            wait_until("every process of the dead worker has gone", lambda: not any(map(alive, family)))
        finally:
            for pid in filter(alive, family):
                os.kill(pid, signal.SIGKILL)
        assert all(alive(pid) for pid in others) and len(list(tmp_path.iterdir())) == 1
        assert sweep(tmp_path) == 0 and all(alive(pid) for pid in others)
        assert living.stdin is not None
        living.stdin.close()
        assert living.wait(60.0) == 0
    assert list(tmp_path.iterdir()) == [] and mounts_naming(str(tmp_path)) == []


def test_a_name_is_of_one_process_and_one_boot(tmp_path: Path) -> None:
    boot, namespace, pid, started = identity().split(".")
    assert lives(identity()) and pid == str(os.getpid())
    for other in (f"{boot}.{namespace}.{pid}.{int(started) + 1}", f"other.{namespace}.{pid}.{started}", "", "x"):
        assert not lives(other)


def test_only_carriers_of_the_very_name_end_and_never_of_a_living_one(tmp_path: Path) -> None:
    boot, namespace, pid, started = identity().split(".")
    gone = f"{boot}.{namespace}.{pid}.{int(started) - 1}"  # a process that had our id before us
    marks = {"gone": gone, "longer": gone + "1", "mine": identity()}
    with contextlib.ExitStack() as stack:
        sleeping = {
            kind: stack.enter_context(subprocess.Popen(["sleep", "300"], env={VARIABLE: mark}))
            for kind, mark in marks.items()
        }
        try:
            for kind in marks:
                wait_until("it has started", lambda kind=kind: _is_sleep(sleeping[kind].pid))  # type: ignore[misc]
            directory = tmp_path / (OWNED + "run-1")
            directory.mkdir()
            (directory / OWNER).write_text(gone)
            assert sweep(tmp_path) == 1 and not directory.exists()
            assert sleeping["gone"].wait(30.0) == -signal.SIGKILL
            assert end_carriers(identity()) == 0
            assert sleeping["longer"].poll() is None and sleeping["mine"].poll() is None
        finally:
            for one in sleeping.values():
                one.kill()


def _is_sleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")
