"""Whose end a command's exit code tells: its own, or that of whoever held its terminal."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from sandbox.foreground import orphaned
from sandbox.started import Spawned
from tests.support.waiting import eventually


@pytest.fixture
def held() -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A terminal's master, and the process whose session holds its other side."""
    master, slave = os.openpty()
    holder = subprocess.Popen(["setsid", "--ctty", "sleep", "60"], stdin=slave)
    os.close(slave)
    yield master, holder
    holder.kill()
    holder.wait()
    os.close(master)


async def test_a_terminal_is_orphaned_once_its_holder_is_gone(held: tuple[int, subprocess.Popen[bytes]]) -> None:
    master, holder = held
    spawned = Spawned(holder.pid, master, -1, asyncio.get_running_loop().create_future())
    await eventually(lambda: os.tcgetpgrp(master) == holder.pid, "the session's terminal")
    assert not await orphaned(spawned, 0)
    holder.kill()
    holder.wait()
    assert await orphaned(spawned, 0)


async def test_who_was_hung_up_is_believed_when_the_holder_is_seen_to_live_on(
    held: tuple[int, subprocess.Popen[bytes]],
) -> None:
    master, holder = held
    spawned = Spawned(holder.pid, master, -1, asyncio.get_running_loop().create_future())
    await eventually(lambda: os.tcgetpgrp(master) == holder.pid, "the session's terminal")
    assert not await orphaned(spawned, 128 + signal.SIGHUP)
    asked = asyncio.create_task(orphaned(spawned, 128 + signal.SIGHUP))
    await asyncio.sleep(0)
    assert not asked.done(), "what is being killed may still be alive here"
    holder.kill()
    holder.wait()
    spawned.exited.set_result(-signal.SIGKILL)
    assert await asked
