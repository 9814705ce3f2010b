"""One interactive program on a terminal of its own in a sandbox: keys go in, its screen is read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from sandbox.outbox import Outbox
from sandbox.protocols import Screen
from sandbox.screen import TerminalScreen, key_bytes
from sandbox.spawn_client import SpawnClient
from sandbox.started import Spawned, exit_code, gone

_READ_BYTES = 64 * 1024
_KEYS_BYTES = 64 * 1024
_STILL_S = 0.1
"""A screen is at rest when nothing came for this long."""


class InteractiveProgram:
    """See `Program`; belongs to one event loop and owns the record's descriptors.

    Args:
        process: just started.
        spawner: kills it.
        rows: of its terminal.
        columns: of its terminal.
        leave_s: deadline of its going away once it is killed.
    """

    def __init__(self, process: Spawned, spawner: SpawnClient, rows: int, columns: int, leave_s: float) -> None:
        self._process, self._spawner, self._leave_s = process, spawner, leave_s
        self._keys = Outbox(process.master)
        loop = asyncio.get_running_loop()
        self._screen = TerminalScreen(rows, columns, lambda data: loop.call_soon_threadsafe(self._answer, data))
        self._looking = asyncio.Lock()
        self._heard = asyncio.Event()
        self._closed = False
        loop.add_reader(process.master, self._on_readable)
        process.exited.add_done_callback(lambda _: self._heard.set())

    async def screen(self, wait_s: float = 0.0) -> Screen:
        """See `Program.screen`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._heard.wait()
                while not self._process.exited.done():
                    self._heard.clear()
                    async with asyncio.timeout(_STILL_S):
                        await self._heard.wait()
        self._heard.clear()
        if not self._closed:
            self._on_readable()
        exited = self._process.exited
        async with self._looking:
            code = exit_code(exited.result()) if exited.done() else None
            return await asyncio.to_thread(
                self._screen.look, *self._screen.take(), running=code is None, exit_code=code
            )

    async def send(self, text: str = "", *, keys: Sequence[str] = (), wait_s: float = 1.0) -> Screen:
        """See `Program.send`."""
        data = text.encode("utf-8", "surrogateescape") + b"".join(map(key_bytes, keys))
        if len(data) > _KEYS_BYTES:
            raise ValueError(f"{len(data)} bytes of keys; at most {_KEYS_BYTES} are sent at once")
        if self._closed or self._process.exited.done():
            return await self.screen()
        self._heard.clear()
        self._keys.send(data)
        return await self.screen(wait_s)

    async def wait(self, timeout_s: float) -> Screen:
        """See `Program.wait`."""
        started = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._process.exited), timeout_s)
        return await self.screen(max(0.0, min(_STILL_S, timeout_s - (time.monotonic() - started))))

    async def close(self) -> None:
        """See `Program.close`."""
        if self._closed:
            return
        self._closed = True
        self._spawner.kill(self._process.pid)
        asyncio.get_running_loop().remove_reader(self._process.master)
        self._keys.close()
        self._process.close()
        self._heard.set()
        await gone(self._process, "program", self._leave_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _answer(self, data: bytes) -> None:
        if not self._closed:
            self._keys.send(data)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._process.master, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # no process holds the terminal any more
            asyncio.get_running_loop().remove_reader(self._process.master)
            return
        self._screen.add(data)
        self._heard.set()
