"""A spawner that is killed takes along what it had started: that has no result, which would count for a policy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox.bubblewrap import BubblewrapBackend
from sandbox.errors import SandboxError
from sandbox.none import NoneBackend
from sandbox.protocols import SandboxSpec
from sandbox.pty_backend import PtyBackend
from tests.integration.sandbox.grounds import QUICK
from tests.support.waiting import eventually


@pytest.mark.parametrize("backend", [NoneBackend, BubblewrapBackend])
@pytest.mark.parametrize("tool", ["shell", "program"])
async def test_what_went_with_its_spawner_has_no_result(backend: type[PtyBackend], tool: str, tmp_path: Path) -> None:
    spec = SandboxSpec(limits=QUICK)
    async with backend(tmp_path) as running:
        async with running.create(spec) as sandbox:
            await sandbox.start()
            calling: asyncio.Task[object] = asyncio.create_task(
                sandbox.shell.run("sleep 60") if tool == "shell" else sandbox.execute(("/bin/sleep", "60"))
            )
            await eventually(lambda: sandbox.shell._scanner is not None or sandbox._running is not None, "it runs")
            assert running._spawner._process is not None
            running._spawner._process.kill()
            with pytest.raises(SandboxError, match=r"spawner was lost|ended from outside"):
                await calling
            with pytest.raises(SandboxError):
                await sandbox.shell.run("true")
        async with running.create(spec) as another:
            assert (await another.shell.run("echo there")).output == "there\n"
