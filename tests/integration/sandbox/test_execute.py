"""Programs that run alone in a sandbox: what reaches them, what they give, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

import pytest

from sandbox.errors import SandboxError
from sandbox.protocols import Execution, Sandbox
from tests.integration.sandbox.grounds import BACKENDS, alive, in_sandbox, wait_until

PYTHON = ("/usr/bin/python3", "-I", "-S", "-B", "-c")
OURS = {"ROLLMILL_SANDBOX", "ROLLMILL_WORKER"}
"""Names by which a later start finds what a dead worker left."""


def fresh() -> str:
    """A mark of this test alone: others on this machine may run the same one just now."""
    return f"mark{os.urandom(8).hex()}"


def marked(mark: str) -> list[int]:
    """Processes of this machine whose command line holds `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes() and alive(int(entry.name)):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _first_word(pid: int) -> str:
    """The name that a process runs under; its launchers have the mark among their arguments only."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()
    except OSError:
        return ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_input_report_output_and_exit_code_pass(tmp_path: Path, backend: str) -> None:
    source = (
        "import json, os, sys; given = sys.stdin.buffer.read(); print('out'); print('err', file=sys.stderr)\n"
        "os.write(3, json.dumps([len(given), sorted(os.environ), os.getcwd()]).encode()); sys.exit(7)"
    )

    async def body(sandbox: Sandbox) -> Execution:
        return await sandbox.execute((*PYTHON, source), input=b"x" * 3_000_000, env={"A": "b"}, cwd="/tmp")

    done = in_sandbox(backend, tmp_path, body)
    assert (done.exit_code, sorted(done.output.split())) == (7, [b"err", b"out"])
    length, variables, cwd = json.loads(done.report)
    assert length == 3_000_000 and cwd.endswith("/tmp")
    assert set(variables) <= {"A", "PWD", "SHLVL", "LC_CTYPE", *OURS} and "A" in variables
    assert not (done.timed_out or done.truncated or done.report_overflow)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_of_the_shell_is_there_and_files_are(tmp_path: Path, backend: str) -> None:
    mark = fresh()

    async def body(sandbox: Sandbox) -> tuple[Execution, list[int], bool]:
        await sandbox.shell.run(f"bash -c 'exec -a {mark} sleep 1000' & setsid bash -c 'exec -a {mark} sleep 1000' &")
        await sandbox.files.write("/work/kept", "kept")
        await asyncio.to_thread(wait_until, "both run", lambda: len(marked(mark)) >= 2)
        done = await sandbox.execute(("/bin/true",))
        left = marked(mark)
        again = await sandbox.shell.run("true")
        assert await sandbox.files.read("/work/kept") == b"kept"
        return done, left, again.restarted

    done, left, restarted = in_sandbox(backend, tmp_path, body)
    assert (done.exit_code, left, restarted) == (0, [], True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_next_shell_has_its_own_terminal_whatever_has_its_predecessors_number_now(
    tmp_path: Path, backend: str
) -> None:
    async def body(sandbox: Sandbox) -> str:
        await sandbox.shell.run("true")
        await sandbox.execute(("/bin/true",))
        with contextlib.ExitStack() as held:
            for _ in range(16):
                held.enter_context(open("/dev/null"))
            return (await sandbox.shell.run("echo there")).output

    assert in_sandbox(backend, tmp_path, body) == "there\n"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_child_without_an_environment_ends_with_its_sandbox(tmp_path: Path, backend: str) -> None:
    """As one that is amid an exec: nothing in it tells whose it is."""
    mark = fresh()

    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run(f"env -i bash -c 'exec -a {mark} sleep 1000' &")
        await asyncio.to_thread(wait_until, "it runs", lambda: any(_first_word(pid) == mark for pid in marked(mark)))

    in_sandbox(backend, tmp_path, body)
    assert marked(mark) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_only_just_being_started_ends_with_its_sandbox(tmp_path: Path, backend: str) -> None:
    mark = fresh()
    start = f"(setsid bash -c 'exec -a {mark} sleep 1000' &); bash -c 'exec -a {mark} sleep 1000' & "

    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run(start * 4)

    for _ in range(4):  # each is stopped while forks and execs are under way
        in_sandbox(backend, tmp_path, body)
        assert marked(mark) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("end", ["exit", "timeout", "cancel"])
def test_what_a_program_leaves_is_gone(tmp_path: Path, backend: str, end: str) -> None:
    mark = fresh()
    wait = "exit 0" if end == "exit" else "wait"
    command = f"(setsid bash -c 'exec -a {mark} sleep 1000' &) ; bash -c 'exec -a {mark} sleep 1000' & {wait}"

    async def body(sandbox: Sandbox) -> None:
        running = asyncio.create_task(
            sandbox.execute(("/bin/bash", "-c", command), timeout_s=0.5 if end == "timeout" else 60)
        )
        if end == "cancel":
            await asyncio.to_thread(wait_until, "both run", lambda: len(marked(mark)) >= 2)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        else:
            assert (await running).timed_out == (end == "timeout")
        assert marked(mark) == []
        assert (await sandbox.execute(("/bin/true",))).exit_code == 0

    in_sandbox(backend, tmp_path, body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_floods_are_bounded(tmp_path: Path, backend: str) -> None:
    async def body(sandbox: Sandbox) -> tuple[Execution, Execution]:
        report = await sandbox.execute(("/bin/sh", "-c", "cat /dev/zero >&3"), report_bytes=1000, timeout_s=20)
        output = await sandbox.execute(("/bin/sh", "-c", "head -c 9999999 /dev/zero"), output_bytes=100, timeout_s=20)
        return report, output

    report, output = in_sandbox(backend, tmp_path, body)
    assert (len(report.report), report.report_overflow, report.timed_out, report.exit_code) == (1000, True, False, 137)
    assert output.exit_code == 0 and output.truncated and len(output.output) < 200


def test_the_program_is_alone_without_privilege_and_cannot_be_killed(isolating: str, tmp_path: Path) -> None:
    source = (
        "import json, os, subprocess\n"
        "lines = [line.split() for line in open('/proc/self/status')]\n"
        "caps = [line[1] for line in lines if line[0] in ('CapEff:', 'CapBnd:', 'NoNewPrivs:')]\n"
        "subprocess.run(['/bin/bash', '-c', 'kill -9 1; kill -9 -1; kill -9 $PPID'])\n"
        "pids = [name for name in os.listdir('/proc') if name.isdigit()]\n"
        "os.write(3, json.dumps([os.getpid(), pids, caps]).encode())"
    )

    async def body(sandbox: Sandbox) -> Execution:
        return await sandbox.execute((*PYTHON, source))

    done = in_sandbox(isolating, tmp_path, body)
    assert done.exit_code == 0, done.output
    assert json.loads(done.report) == [1, ["1"], ["0" * 16, "0" * 16, "1"]]


def test_a_program_that_is_not_there_and_a_relative_one(isolating: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> Execution:
        with pytest.raises(SandboxError, match="absolute path"):
            await sandbox.execute(("true",))
        return await sandbox.execute(("/no/such/program",))

    done = in_sandbox(isolating, tmp_path, body)
    assert done.exit_code != 0 and b"/no/such/program" in done.output


def test_a_stop_ends_a_running_program(isolating: str, tmp_path: Path) -> None:
    mark = fresh()

    async def body(sandbox: Sandbox) -> None:
        running = asyncio.create_task(sandbox.execute(("/bin/bash", "-c", f"exec -a {mark} sleep 1000")))
        await asyncio.to_thread(wait_until, "it runs", lambda: any(_first_word(pid) == mark for pid in marked(mark)))
        await sandbox.stop()
        with pytest.raises(SandboxError, match="has stopped"):  # what was cut off has no result
            await running
        assert marked(mark) == []
        with pytest.raises(SandboxError, match="stopped"):
            await sandbox.execute(("/bin/true",))

    in_sandbox(isolating, tmp_path, body)
