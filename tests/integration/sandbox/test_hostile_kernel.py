"""Kernels that attack the worker: memory and time stay bounded, the shell and the other sandboxes go on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from sandbox.errors import PythonUnavailable
from sandbox.protocols import Sandbox, SandboxLimits, SandboxSpec
from tests.integration.sandbox.grounds import backend_named, in_sandbox

HOSTILE = Path(__file__).with_name("hostile_kernel.py")
PATH = {"PATH": "/work/bin:/usr/local/bin:/usr/bin:/bin"}
SPEC = SandboxSpec(limits=SandboxLimits(interrupt_grace_s=0.3, kill_grace_s=0.4, start_s=30.0), env=PATH)
WAITING = SandboxSpec(limits=SandboxLimits(interrupt_grace_s=0.3, kill_grace_s=0.4, start_s=8.0), env=PATH)
"""For the start that is waited for until its deadline."""
AT_START = {
    "silent": "did not answer within 8 s",
    "noise": "greeting is not ZeroMQ's",
    "huge": "a message of more than",
    "endless": "a message of more than",
    "frames": "a message of more than",
    "commands": "commands",
    "empty": "no message of the kernel protocol",
    "unsigned": "wrong signature",
    "fields": "wrong fields",
    "nested": "wrong fields",
}


def rss_mib() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


async def take_over(sandbox: Sandbox, mode: str) -> None:
    """What an agent does in a sandbox of its own: another program in python3's place."""
    program = "#!/usr/bin/python3\n" + HOSTILE.read_text()
    await sandbox.files.write("/work/bin/python3", program.replace('"silent"', repr(mode), 1), mode=0o755)


@pytest.mark.parametrize("mode", AT_START)
def test_a_hostile_start_ends_the_kernel_and_nothing_else(isolating: str, tmp_path: Path, mode: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run("KEPT=yes")
        await take_over(sandbox, mode)
        before = rss_mib()
        with pytest.raises(PythonUnavailable, match=AT_START[mode]):
            await sandbox.python.run("1")
        assert rss_mib() - before < 48
        assert (await sandbox.shell.run("echo $KEPT; pgrep -f ROLLMILL || true")).output == "yes\n"
        await sandbox.shell.run("rm /work/bin/python3")
        assert (await sandbox.python.run("1+1")).text == "2\n"

    in_sandbox(isolating, tmp_path, body, WAITING if mode == "silent" else SPEC)


@pytest.mark.parametrize(("mode", "text"), [("flood", "flood\nflood\n"), ("images", "images left out"), ("late", "")])
def test_a_flood_starves_nobody(tmp_path: Path, mode: str, text: str) -> None:
    async def scenario() -> None:
        async with (
            backend_named("bubblewrap", tmp_path) as backend,
            backend.create(SPEC) as hostile,
            backend.create(SPEC) as other,
        ):
            await other.python.run("1")
            await take_over(hostile, mode)
            before, started = rss_mib(), time.monotonic()
            flooding = asyncio.create_task(hostile.python.run("1", timeout_s=2.0))
            turns = 0
            while not flooding.done():
                assert (await other.shell.run("echo alive")).output == "alive\n"
                assert (await hostile.shell.run("echo alive")).output == "alive\n"
                assert (await other.python.run("1+1")).text == "2\n"
                turns += 1
            result = await flooding
            assert time.monotonic() - started < 60.0 and turns >= 4, turns
            assert text in result.text and len(result.text) < 70_000 and sum(map(len, result.images)) < 9_000_000
            assert mode == "late" or (result.timed_out and result.restarted)
            assert rss_mib() - before < 64

    asyncio.run(scenario())
