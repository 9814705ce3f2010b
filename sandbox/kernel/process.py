"""One kernel that runs in a sandbox: its process, its two channels, and the cell that it works on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from sandbox.kernel.cell import CellOutput
from sandbox.kernel.channel import Channel
from sandbox.kernel.messages import Failed, Message, Reply, Shown, Status, Stream, Wire
from sandbox.marker import BoundedOutput
from sandbox.spawn_client import SpawnClient
from sandbox.started import Joined, gone

_IDLE_GRACE_S = 1.0
"""From a cell's reply to the last of its output, which has a channel of its own: an honest kernel needs a moment."""
_ASK_AGAIN_S = 0.05
_READ_BYTES = 16 * 1024
_LAST_WORDS = 4096


class KernelProcess:
    """Belongs to one event loop; owns the record's descriptors.

    Args:
        joined: just started.
        wire: signs and reads its messages.
        spawner: interrupts and kills it.
        output_bytes: most bytes of a cell's text.
    """

    def __init__(self, joined: Joined, wire: Wire, spawner: SpawnClient, output_bytes: int) -> None:
        self._joined, self._wire, self._spawner, self._output_bytes = joined, wire, spawner, output_bytes
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = loop.create_future()
        """Set when there is no kernel any more: why."""
        self._said = BoundedOutput(_LAST_WORDS)
        self._output = CellOutput(output_bytes)
        self._request = ""
        self._replied = self._idle = False
        self._heard = asyncio.Event()
        self._closed = False
        loop.add_reader(joined.output, self._on_output)
        self._shell = Channel(joined.channels[0], "DEALER", self._on_shell, self._on_broken)
        self._iopub = Channel(joined.channels[1], "SUB", self._on_iopub, self._on_broken)
        joined.exited.add_done_callback(self._on_exit)

    @property
    def pending(self) -> bool:
        """A cell was sent and its output not taken yet."""
        return bool(self._request)

    @property
    def busy(self) -> bool:
        """A cell has not ended yet."""
        return bool(self._request) and not (self._replied and self._idle)

    @property
    def last_words(self) -> str:
        """What the process wrote beside its protocol: why it could not start."""
        return self._said.text().strip()

    async def ready(self) -> bool:
        """Wait until it answers and its output is heard; False where it ended instead."""
        while True:
            self._ask("kernel_info_request", {})
            if not await self._until(lambda: self._replied, None):
                return False
            if await self._until(lambda: self._idle, asyncio.get_running_loop().time() + _ASK_AGAIN_S):
                return True

    def begin(self, code: str) -> None:
        """Send a cell."""
        self._ask(
            "execute_request",
            {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False,
             "stop_on_error": True},
        )  # fmt: skip

    async def ended(self, timeout_s: float | None) -> bool:
        """Wait for the end of what was sent; False where the time or the end of the kernel came first."""
        loop = asyncio.get_running_loop()
        until = None if timeout_s is None else loop.time() + timeout_s
        if not await self._until(lambda: self._replied, until):
            return False
        late = loop.time() + _IDLE_GRACE_S
        await self._until(lambda: self._idle, late if until is None else min(until, late))
        return self._idle or loop.time() >= late

    def take(self) -> CellOutput:
        """What the cell left; what comes later belongs to the next."""
        taken, self._output, self._request = self._output, CellOutput(self._output_bytes), ""
        return taken

    def interrupt(self) -> None:
        """SIGINT to the kernel and what it started."""
        self._spawner.interrupt(self._joined.pid)

    async def end(self, timeout_s: float, reason: str = "it was ended") -> None:
        """SIGKILL, and wait until it is gone. Idempotent.

        Raises:
            SandboxError: it is still there at the deadline.
        """
        self._lose(reason)
        self._spawner.kill(self._joined.pid)
        try:
            await gone(self._joined, "kernel", timeout_s)
        finally:
            self._close()

    def _ask(self, kind: str, content: dict[str, Any]) -> None:
        self._request, frames = self._wire.request(kind, content)
        self._replied = self._idle = False
        self._shell.send(frames)

    async def _until(self, holds: Callable[[], bool], deadline: float | None) -> bool:
        try:
            async with asyncio.timeout_at(deadline):
                while not holds():
                    if self.lost.done():
                        return False
                    self._heard.clear()
                    await self._heard.wait()
        except TimeoutError:
            return holds()
        return True

    def _on_shell(self, frames: list[bytes]) -> None:
        message = self._wire.read(frames)
        if isinstance(message.body, Reply) and message.parent == self._request:
            self._replied = True
            self._heard.set()

    def _on_iopub(self, frames: list[bytes]) -> None:
        message: Message = self._wire.read(frames)
        match message.body:
            case Stream(text):
                self._output.printed(text)  # of whichever cell: its threads print on
            case Shown(data):
                self._output.shown(data.plain, (data.png, data.jpeg))
            case Failed(name, value, traceback) if message.parent == self._request:
                self._output.failed(name, value, traceback)
            case Status("idle") if message.parent == self._request:
                self._idle = True
                self._heard.set()
            case _:
                pass

    def _on_output(self) -> None:
        if self._closed:
            return
        try:
            data = os.read(self._joined.output, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._joined.output)
        self._said.add(data)

    def _on_broken(self, reason: str) -> None:
        self._spawner.kill(self._joined.pid)
        self._lose(f"{reason}; it was ended")

    def _on_exit(self, exited: asyncio.Future[int]) -> None:
        if self._closed:
            return
        self._on_output()
        self._iopub.drain()
        self._shell.drain()
        status = exited.result()
        killed = -status if status < 0 else max(status - 128, 0)  # a script that stands for python3 tells of it so
        how = f"with exit code {status}" if not killed else f"by signal {killed}"
        hint = " (out of memory?)" if killed == 9 else ""
        self._lose(f"it ended {how}{hint}")

    def _lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
        self._heard.set()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._joined.output)
        os.close(self._joined.output)
        self._shell.close()
        self._iopub.close()
