"""What is left of a start that was cancelled: a thread that nobody runs into, and no process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sandbox.bubblewrap import BubblewrapBackend
from sandbox.ground import Entry
from sandbox.none import NoneBackend
from sandbox.protocols import SandboxSpec
from sandbox.pty_backend import PtyBackend
from sandbox.pty_sandbox import PtySandbox
from tests.integration.sandbox.grounds import QUICK
from tests.support.waiting import eventually

T = TypeVar("T")

BACKENDS = pytest.mark.parametrize("backend", [NoneBackend, BubblewrapBackend])


class Paused:
    """Has the directory made when it is let go."""

    def __init__(self, prepare: Callable[[], Entry]) -> None:
        self._prepare, self.begun, self.go = prepare, threading.Event(), threading.Event()

    def __call__(self) -> Entry:
        self.begun.set()
        assert self.go.wait(60)
        return self._prepare()

    async def amid(self, use: Coroutine[Any, Any, T]) -> T:
        """What a use gives that begins while the directory is still being made."""
        using = asyncio.create_task(use)
        await asyncio.sleep(0)
        self.go.set()
        return await using


async def cancelled_start(backend: PtyBackend, monkeypatch: pytest.MonkeyPatch) -> tuple[PtySandbox, Paused]:
    sandbox = backend.create(SandboxSpec(workspace=("/workspace",), limits=QUICK))
    paused = Paused(sandbox._ground.prepare)
    monkeypatch.setattr(sandbox._ground, "prepare", paused)
    starting = asyncio.create_task(sandbox.start())
    await eventually(paused.begun.is_set, "its directory is being made")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    return sandbox, paused


@BACKENDS
async def test_the_next_use_waits_for_it(
    backend: type[PtyBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with backend(tmp_path) as running:
        sandbox, paused = await cancelled_start(running, monkeypatch)
        async with sandbox:
            assert (await paused.amid(sandbox.shell.run("echo there"))).output == "there\n"


@BACKENDS
async def test_a_stop_leaves_no_directory(
    backend: type[PtyBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with backend(tmp_path) as running:
        sandbox, paused = await cancelled_start(running, monkeypatch)
        await paused.amid(sandbox.stop())
        assert not sandbox.directory.exists()


@BACKENDS
@pytest.mark.parametrize("until", ["asked", "program", "prompt", "file"])
async def test_nothing_runs_any_more_when_a_cancelled_call_is_over(
    backend: type[PtyBackend], until: str, tmp_path: Path
) -> None:
    async with backend(tmp_path) as running, running.create(SandboxSpec(limits=QUICK)) as sandbox:
        if until == "program":
            await sandbox.start()
        calling: asyncio.Task[object] = asyncio.create_task(
            sandbox.execute(("/bin/sleep", "9")) if until == "program"
            else sandbox.files.list("/") if until == "file" else sandbox.start()
        )  # fmt: skip
        async with asyncio.timeout(60):
            while sandbox.shell.process is None if until == "prompt" else not running._spawner._asked:
                await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert (running._spawner._asked, running._spawner._exits) == ({}, {})
