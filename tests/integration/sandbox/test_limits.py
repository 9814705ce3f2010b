"""Agents that take all that they can get: the sandbox is ended by its limit's name, the worker's others go on."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from sandbox.apptainer import ApptainerBackend
from sandbox.bubblewrap import BubblewrapBackend
from sandbox.errors import LimitExceeded, SandboxError
from sandbox.limits import Bounds
from sandbox.protocols import SandboxLimits, SandboxSpec
from sandbox.pty_backend import PtyBackend
from tests.integration.sandbox.grounds import QUICK

BACKENDS: dict[str, type[PtyBackend]] = {"bubblewrap": BubblewrapBackend, "apptainer": ApptainerBackend}
TIGHT = Bounds(memory_mib=160, processes=90, disk_mib=48, files=600, open_files=200, cpu_s=30.0)
BESIDE = 4
"""Attacks at once: enough to be in each other's way, few enough for two cores."""
PYTHON = "python3 -I -c '{}'; sleep 180"
ATTACKS = {
    "processes": "for i in $(seq 300); do (exec sleep 180) & done; wait",
    "threads": PYTHON.format(
        "import threading as t\nt.stack_size(1 << 16)\ntry:\n  for i in range(200):\n"
        "    t.Thread(target=t.Event().wait, daemon=True).start()\n"
        "except RuntimeError: pass\nt.Event().wait()"  # an ordinary user is refused more, and stays where it is
    ),
    "balloon": PYTHON.format("x = bytearray(200 << 20); import time; time.sleep(180)"),
    "balloons": "for i in 1 2 3; do python3 -I -c 'x = bytearray(70 << 20); import time; time.sleep(180)' & done; wait",
    "memory files": PYTHON.format(
        'import os, time\nfor i in range(6):\n  os.write(os.memfd_create("x"), bytes(40 << 20))\ntime.sleep(180)'
    ),
    "disk": "for i in $(seq 99); do head -c 10M /dev/zero >/work/f$i; done; sleep 180",
    "unlinked": 'for i in 3 4 5 6 7; do eval "exec $i>/tmp/g"; rm /tmp/g; head -c 20M /dev/zero >&$i; done; sleep 180',
    "names": PYTHON.format('for i in range(2000): open(str(i), "w").close()'),
    "hidden names": "mkdir h; cd h; for i in $(seq 900); do echo >$i; done; cd ..; chmod 000 h; sleep 180",
    "depth": PYTHON.format('import os\nfor i in range(700):\n  os.mkdir("d"); os.chdir("d")'),
}
NAMES = {
    "processes": "processes", "threads": "processes", "balloon": "memory_mib", "balloons": "memory_mib",
    "memory files": "memory_mib", "disk": "disk_mib", "unlinked": "disk_mib", "names": "files",
    "hidden names": "files", "depth": "files",
}  # fmt: skip


def test_what_takes_too_much_is_ended_by_name_and_the_others_go_on(isolating: str, tmp_path: Path) -> None:
    """Attacks beside each other in one worker, and an honest sandbox in their midst."""

    async def attack(backend: PtyBackend, kind: str) -> LimitExceeded:
        async with backend.create(SandboxSpec(limits=QUICK)) as sandbox:
            with pytest.raises(LimitExceeded) as caught:
                result = await sandbox.shell.run(ATTACKS[kind], 180.0)
                raise AssertionError(f"{kind}: {result}")
            for use in (sandbox.shell.run("true"), sandbox.files.read("/etc/passwd"), sandbox.pack()):
                with pytest.raises(LimitExceeded):
                    await use
            return caught.value

    async def scenario() -> None:
        async with BACKENDS[isolating](tmp_path, TIGHT) as backend:
            honest = backend.create(SandboxSpec(limits=QUICK))
            await honest.shell.run("KEPT=yes; echo work >file")
            turns = asyncio.Semaphore(BESIDE)

            async def in_turn(kind: str) -> LimitExceeded:
                async with turns:
                    return await attack(backend, kind)

            ended = await asyncio.gather(*(in_turn(kind) for kind in ATTACKS))
            assert {kind: error.limit for kind, error in zip(ATTACKS, ended, strict=True)} == NAMES
            for error in ended:
                assert f"sandbox.limits.{error.limit}" in str(error) and error.boundary == "limits"
            assert (await honest.shell.run("echo $KEPT; cat file")).output == "yes\nwork\n"

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


def test_what_one_process_may_is_refused_to_it_alone(isolating: str, tmp_path: Path) -> None:
    """The kernel's own limits: the process hears of it, the sandbox goes on."""

    async def scenario() -> None:
        spec = SandboxSpec(limits=SandboxLimits(shm_mib=8, interrupt_grace_s=0.3, kill_grace_s=0.4))
        async with (
            BACKENDS[isolating](tmp_path, Bounds(memory_mib=100, file_mib=4, open_files=64)) as backend,
            backend.create(spec) as sandbox,
        ):
            run = sandbox.shell.run
            size = await run("head -c 20M /dev/zero >/tmp/f; stat -c %s /tmp/f")
            assert size.output.split()[-1] == str(4 << 20)
            shared = await run("for i in 1 2 3; do head -c 4M /dev/zero >/dev/shm/$i; done; du -sm /dev/shm")
            assert "No space" in shared.output and shared.output.split()[-2] == "8"
            opened = await run("python3 -I -c 'x = [open(\"/dev/null\") for _ in range(99)]'")
            assert "Too many open files" in opened.output
            mapped = await run("python3 -I -c 'bytearray(1 << 30)'")
            assert "MemoryError" in mapped.output
            ipc = await run("cd /proc/sys/kernel; cat shmall msgmni; echo 1 >shmall; cat shmall; cd /work")
            pages, queues, *said, kept = ipc.output.split("\n")[:-1]
            assert (int(pages) * os.sysconf("SC_PAGE_SIZE"), queues, kept) == (64 << 20, "16", pages) and said
            core = await run("ulimit -c; cat /proc/self/oom_score_adj; ulimit -Hn 999 2>/dev/null || echo kept")
            assert core.output.split() == ["0", "1000", "kept"]

    asyncio.run(scenario())


def test_processor_and_wall_time_end_a_sandbox(isolating: str, tmp_path: Path) -> None:
    async def spin(bounds: Bounds, command: str) -> LimitExceeded:
        async with BACKENDS[isolating](tmp_path, bounds) as backend, backend.create(SandboxSpec(limits=QUICK)) as one:
            with pytest.raises(LimitExceeded) as caught:
                await one.shell.run(command, 180.0)
            return caught.value

    short = "while :; do /bin/true; done"  # each process is short: what counts is their sum
    assert asyncio.run(spin(Bounds(cpu_s=0.5), short)).limit == "cpu_s"
    assert asyncio.run(spin(Bounds(wall_s=0.5), "sleep 180")).limit == "wall_s"


def test_what_runs_alone_and_what_joined_are_watched_too(isolating: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with BACKENDS[isolating](tmp_path, TIGHT) as backend:
            async with backend.create(SandboxSpec(limits=QUICK)) as graded:
                with pytest.raises(LimitExceeded, match="memory_mib"):
                    await graded.execute(
                        ("/usr/bin/python3", "-I", "-c", "x = bytearray(200 << 20); import time; time.sleep(180)"),
                        timeout_s=180.0,
                    )
            async with backend.create(SandboxSpec(limits=QUICK)) as taught:
                grown = "x = bytearray(200 << 20)\nimport time\ntime.sleep(180)"
                cell = asyncio.create_task(taught.python.run(grown, 180.0))
                assert "lost" in ((await cell).error or "")
                with pytest.raises(LimitExceeded, match="memory_mib"):
                    await taught.shell.run("true")

    asyncio.run(scenario())


def test_a_stubborn_agent_does_not_hold_up_the_worker(isolating: str, tmp_path: Path) -> None:
    """Ignored signals, a daemon that left twice, and a shell whose terminal was closed under it."""

    async def scenario() -> None:
        async with BACKENDS[isolating](tmp_path) as backend:
            honest = backend.create(SandboxSpec(limits=QUICK))
            await honest.shell.run("KEPT=yes")
            deaf, daemon, closed = (backend.create(SandboxSpec(limits=QUICK)) for _ in range(3))
            mark = str(301_000_000 + os.getpid())  # a time to sleep that is in no other's command line
            stubborn = await deaf.shell.run("trap '' TERM INT HUP QUIT; (trap '' TERM INT; sleep 300); sleep 300", 0.5)
            assert stubborn.timed_out
            leaves = f'trap "" TERM HUP; sleep {mark} & sleep {mark}'
            await daemon.shell.run(f"(setsid sh -c '{leaves}' >/dev/null 2>&1 &) &")
            lost = await closed.shell.run("exec <&- >&- 2>&-; sleep 300", 0.5)
            assert lost.timed_out or lost.restarted
            started = time.monotonic()
            await asyncio.gather(*(one.stop() for one in (deaf, daemon, closed)))
            assert time.monotonic() - started < 60.0  # not the 300 s for which they would go on
            assert (await honest.shell.run("echo $KEPT")).output == "yes\n"
            assert _commands(f"sleep\x00{mark}") == []

    asyncio.run(scenario())


def test_a_real_fork_bomb_of_an_ordinary_user_meets_the_kernel(isolating: str, tmp_path: Path) -> None:
    """Root is exempt from this limit of the kernel's: there the watchdog alone stands, see above."""
    if os.getuid() == 0:
        return  # the suite runs once more as an ordinary user
    most, before = 0, _mine()

    async def scenario() -> None:
        nonlocal most
        async with (
            BACKENDS[isolating](tmp_path, Bounds(processes=60)) as backend,
            backend.create(SandboxSpec(limits=QUICK)) as sandbox,
        ):
            bomb = asyncio.create_task(sandbox.shell.run("f() { f | f & }; f; sleep 180", 180.0))
            while not bomb.done():
                most = max(most, _mine() - before)
                await asyncio.sleep(0.02)
            with pytest.raises(SandboxError):
                await bomb

    asyncio.run(scenario())
    assert most < 500  # a bomb that nothing holds has thousands before anybody looks


def _mine() -> int:
    """Processes of this user on the node."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += entry.stat().st_uid == os.getuid()
    return found


def _commands(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text(errors="replace")
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found
