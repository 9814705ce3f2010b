"""Processes that are forked by a server which has their imports: what they are given, how they end, and without it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from launch.forked import MODULES, Forked, ForkError, ForkServer
from launch.supervisor import ChildFailedError, Supervisor, numbered
from stages.layout import RunLayout
from tests.support import runs
from tests.support.waiting import eventually


@contextlib.asynccontextmanager
async def serving(*kinds: str) -> AsyncIterator[ForkServer]:
    async with contextlib.aclosing(ForkServer(kinds)) as server:
        yield server


async def test_a_forked_process_is_the_one_that_its_words_name_and_its_exit_code_comes_back(tmp_path: Path) -> None:
    """It has what its own command line would have given it: output in its log, a session, a name."""
    async with serving("init") as server:
        codes = []
        for number in (1, 2):
            process = await server.fork(["init", str(tmp_path), str(number)], tmp_path / "init.log")
            codes.append(await process.wait())
    assert codes == [2, 2]
    said = (tmp_path / "init.log").read_text()
    assert f"rollmill: init-1: {tmp_path} is no run directory" in said
    assert "rollmill: init-2:" in said


async def test_a_forked_process_takes_signals_that_its_server_is_deaf_to(tmp_path: Path) -> None:
    """It stands where it opens its log, a pipe without a reader: the earliest moment at which it is told to end."""
    os.mkfifo(tmp_path / "log")
    async with serving("init") as server:
        process = await server.fork(["init", str(tmp_path), "1"], tmp_path / "log")
        assert server._process is not None
        server._process.send_signal(signal.SIGTERM)
        await eventually(lambda: os.getsid(process.pid) == process.pid, "it leads a session of its own")
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == -signal.SIGTERM
        assert server._process.poll() is None
        with pytest.raises(ProcessLookupError):
            process.send_signal(signal.SIGTERM)


async def test_a_forked_process_that_is_told_to_end_at_once_does(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    async with serving("init") as server:
        for _ in range(6):
            process = await server.fork(["init", str(tmp_path), "1"], tmp_path / "log")
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                assert await process.wait() == -signal.SIGTERM


async def test_a_server_that_is_killed_ends_no_wait_early_and_another_takes_its_place(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    async with serving("init") as server:
        process = await server.fork(["init", str(tmp_path), "1"], tmp_path / "log")
        waiting = asyncio.create_task(process.wait())
        assert server._process is not None
        server._process.kill()
        await eventually(lambda: server._link is None, "its end is noticed")
        begun, begin = list[int](), server.begin

        def begin_counted() -> None:
            begun.append(1)
            begin()

        server.begin = begin_counted  # type: ignore[method-assign]
        asked = [server.fork(["init", str(tmp_path), "1"], tmp_path / "after.log") for _ in range(3)]
        for after in await asyncio.gather(*asked):  # all that it had forked end with it: they are asked for together
            assert await after.wait() == 2
        assert len(begun) == 1
        assert not waiting.done()
        process.kill()
        assert await waiting == -signal.SIGKILL


async def test_without_a_server_that_answers_processes_are_started_by_themselves(tmp_path: Path) -> None:
    layout, said = RunLayout(tmp_path), list[str]()
    layout.attempt_logs(1).mkdir(parents=True)

    class Absent(ForkServer):
        async def fork(self, words: Sequence[str], log: Path) -> Forked:
            raise ForkError("nobody is there")

    supervisor = Supervisor(layout, numbered([("init", 1)]), 1, said.append, Absent(["init"]))
    with pytest.raises(ExceptionGroup) as failed:
        await supervisor.keep_all()
    assert isinstance(failed.value.exceptions[0], ChildFailedError)
    assert said == ["init-1 is started by itself: nobody is there"]
    assert "is no run directory" in (layout.attempt_logs(1) / "init-1.log").read_text()


IMPORT_ALL = """
import importlib, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(len(os.listdir("/proc/self/task")))
"""


def test_what_is_imported_before_a_fork_starts_no_thread() -> None:
    names = {name for names in MODULES.values() for name in names}
    found = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], capture_output=True, text=True, check=True, cwd=runs.REPOSITORY
    )
    assert found.stdout == "1\n"
