"""kill -9 of a worker: its processes, mounts and scratch directories go with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.errors import ShellDied
from sandbox.protocols import SandboxSpec
from tests.integration.sandbox.grounds import BACKENDS, ISOLATING, QUICK, alive, backend_named, wait_until

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


def held() -> tuple[int, int]:
    """Descriptors and descendants of this process."""
    return len(os.listdir("/proc/self/fd")), len(descendants(os.getpid()))


def no_more(now: tuple[int, int], before: tuple[int, int]) -> bool:
    """What ended a moment ago may still have been counted, in both."""
    return now[0] <= before[0] and now[1] <= before[1]


def mounts_naming(text: str) -> list[str]:
    found = []
    for mounts in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):
            if text in mounts.read_text():
                found.append(str(mounts))
    return found


@pytest.mark.parametrize("name", BACKENDS)
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
        if name in ISOLATING:
            assert mounts_naming(str(scratch))
        worker.send_signal(number)
        worker.wait(60.0)
    wait_until("every process has gone", lambda: not any(alive(pid) for pid in family))
    wait_until("the scratch directory is empty", lambda: list(scratch.iterdir()) == [])
    assert mounts_naming(str(scratch)) == []


def spawner_of(pid: int) -> int:
    (found,) = [
        child for child in descendants(pid) if b"sandbox.spawner" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return found


def test_a_killed_spawner_takes_its_sandboxes_along_and_another_takes_over(isolating: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            backend_named(isolating, tmp_path) as backend,
            backend.create(SandboxSpec(limits=QUICK)) as sandbox,
        ):
            await sandbox.shell.run("echo kept >file; sleep 300 &")
            spawner = spawner_of(os.getpid())
            family = descendants(spawner)
            os.kill(spawner, signal.SIGKILL)
            await asyncio.to_thread(wait_until, "all has gone", lambda: not any(alive(pid) for pid in family))
            with pytest.raises(ShellDied, match="ended from outside by signal 9"):
                await sandbox.shell.run("true")
            async with backend.create(SandboxSpec(limits=QUICK)) as other:
                assert (await other.shell.run("echo fresh")).output == "fresh\n"

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_meant_for_the_worker_does_not_end_its_sandboxes(
    isolating: str, tmp_path: Path, number: signal.Signals
) -> None:
    async def scenario() -> None:
        async with (
            backend_named(isolating, tmp_path) as backend,
            backend.create(SandboxSpec(limits=QUICK)) as sandbox,
        ):
            await sandbox.shell.run("KEPT=yes")
            os.kill(spawner_of(os.getpid()), number)
            assert (await sandbox.shell.run("sleep 0.05; echo $KEPT; kill -l 15")).output == "yes\nTERM\n"
            stopped = await sandbox.shell.run("sleep 300 & kill $!; wait $! 2>/dev/null; echo $?")
            assert stopped.output.endswith("143\n")

    asyncio.run(scenario())


def test_a_hundred_cycles_leave_nothing(isolating: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with backend_named(isolating, tmp_path) as backend:
            await backend.create(SandboxSpec()).start()
            before = held()
            for _ in range(10):
                sandboxes = [backend.create(SandboxSpec()) for _ in range(10)]
                await asyncio.gather(*(one.shell.run("touch x; sleep 100 &") for one in sandboxes))
                await asyncio.gather(*(one.stop() for one in sandboxes))
            await asyncio.to_thread(wait_until, "no more is held", lambda: no_more(held(), before))

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == [] and mounts_naming(str(tmp_path)) == []
