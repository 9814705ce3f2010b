"""One persistent bash on a pty, driven by the event loop: commands in, results out, time-outs that always end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable

from sandbox.bashtext import RUN_LINE, SETUP_LINE, command_packet, setup_script
from sandbox.errors import ShellDied
from sandbox.marker import BoundedOutput, Marker, MarkerScanner
from sandbox.protocols import CommandResult, SandboxLimits
from sandbox.spawn_client import SpawnClient, Spawned

_READ_BYTES = 64 * 1024
_READS_A_TURN = 16  # then other callbacks have their turn: a shell that floods must not starve the loop
_KILL_EVERY_S = 0.05
TIMED_OUT_EXIT = 124

Launch = Callable[[], Awaitable[Spawned]]
"""Starts the sandbox's bash anew on the same files."""


class Terminal:
    """A Shell over a spawned bash.

    Args:
        spawner: kills what was launched.
        launch: starts a bash; called again when one was lost.
        workspace: directories to make before the first command; the first is where the shell starts.
        limits: output bound and graces.
        token: NAME=value that marks the sandbox's processes, where no namespace holds them together.
    """

    def __init__(
        self,
        spawner: SpawnClient,
        launch: Launch,
        workspace: tuple[str, ...],
        limits: SandboxLimits,
        token: str | None = None,
    ) -> None:
        self._spawner, self._launch, self._workspace, self._limits, self._token = (
            spawner,
            launch,
            workspace,
            limits,
            token,
        )
        self._lock = asyncio.Lock()
        self._process: Spawned | None = None
        self._own_group = 0
        self._cwd = workspace[0] if workspace else "/"
        self._output = BoundedOutput(limits.output_bytes)
        self._scanner: MarkerScanner | None = None
        self._ended: asyncio.Future[Marker | None] | None = None
        self._unsent = b""
        self._unsettled = False
        self._started = False

    @property
    def process(self) -> Spawned | None:
        """The bash that runs now."""
        return self._process

    async def start(self) -> None:
        """Launch bash and set it up, where that is not done; the first `run` does it too.

        Raises:
            ShellDied: it ended before its first prompt; the message holds what it printed.
        """
        async with self._lock:
            if self._process is None:
                await self._start()

    async def _start(self) -> None:
        process = await self._launch()
        self._process = process
        loop = asyncio.get_running_loop()
        loop.add_reader(process.master, self._on_readable, process)
        process.exited.add_done_callback(lambda _: self._on_exit(process))
        self._output = BoundedOutput(self._limits.output_bytes)
        try:
            async with asyncio.timeout(self._limits.start_s):
                marker = await self._type(setup_script(self._workspace, self._cwd), SETUP_LINE)
        except TimeoutError as error:
            await self.kill()
            raise ShellDied(
                f"no first prompt within {self._limits.start_s} s; the terminal said: {self._said()}", boundary="start"
            ) from error
        except asyncio.CancelledError:
            self._drop(process)
            raise
        if marker is None:
            self._drop(process)
            raise ShellDied(f"the shell ended before its first prompt: {self._said()}", boundary="start")
        self._cwd = marker.cwd
        self._own_group = os.tcgetpgrp(process.master)
        self._spawner.settle(process.pid)
        self._started = True
        self._output = BoundedOutput(self._limits.output_bytes)

    async def run(self, command: str, timeout_s: float = 30.0) -> CommandResult:
        """See `Shell.run`."""
        async with self._lock:
            started = time.perf_counter()
            restarted = await self._settle()
            try:
                packet = command_packet(command, nonce := secrets.token_hex(8))
            except ValueError as error:
                return CommandResult(2, f"{error}\n", self._cwd, 0.0, restarted=restarted)
            timed_out = False
            self._unsettled = True
            try:
                async with asyncio.timeout(timeout_s):
                    marker = await self._type_packet(packet, nonce, RUN_LINE)
            except TimeoutError:
                timed_out = True
                marker = await self._end_command()
            return await self._conclude(marker, timed_out, restarted, started)

    async def _conclude(self, marker: Marker | None, timed_out: bool, restarted: bool, started: float) -> CommandResult:
        output, process = self._output, self._process
        exit_code = TIMED_OUT_EXIT
        if marker is not None:
            exit_code = marker.exit_code
            self._cwd = marker.cwd
            self._output = BoundedOutput(self._limits.output_bytes)
            self._unsettled = False
        else:
            if process is not None and process.exited.done() and not timed_out:
                status = process.exited.result()
                exit_code = status if status >= 0 else 128 - status
            await self._restart()
            restarted = True
        elapsed = time.perf_counter() - started
        return CommandResult(exit_code, output.text(), self._cwd, elapsed, output.truncated, timed_out, restarted)

    async def kill(self) -> None:
        """SIGKILL the shell and all in its sandbox, and wait until they are gone; idempotent."""
        process = self._process
        if process is None:
            return
        self._spawner.kill(process.pid, self._token)
        try:
            async with asyncio.timeout(self._limits.start_s):
                await asyncio.shield(process.exited)
        except TimeoutError as error:
            raise ShellDied(
                f"process {process.pid} is still there {self._limits.start_s} s after SIGKILL", boundary="stop"
            ) from error
        finally:
            self._drop(process)

    async def _settle(self) -> bool:
        """Bring the shell to a prompt after a cancelled command or a lost start; True where it was started again."""
        if self._process is None:
            lost = self._started
            await self._start()
            return lost
        if not self._unsettled:
            return False
        marker = await self._end_command()
        self._output = BoundedOutput(self._limits.output_bytes)
        if marker is not None:
            self._cwd = marker.cwd
            self._unsettled = False
            return False
        await self._restart()
        return True

    async def _restart(self) -> None:
        await self.kill()
        self._unsettled = False
        try:
            await self._start()
        except ShellDied as error:
            raise ShellDied(f"the shell was lost and does not start again: {error}", boundary="shell") from error

    async def _type(self, text: str, line: bytes) -> Marker | None:
        nonce = secrets.token_hex(8)
        return await self._type_packet(command_packet(text, nonce), nonce, line)

    async def _type_packet(self, packet: bytes, nonce: str, line: bytes) -> Marker | None:
        """Send one command and wait for its marker; None where the shell ended instead."""
        process = self._process
        if process is None:
            return None
        self._scanner = MarkerScanner(nonce, self._output)
        self._ended = asyncio.get_running_loop().create_future()
        if process.exited.done():
            return None
        self._unsent = packet
        self._send_rest(process)
        with contextlib.suppress(OSError):  # a dead shell: its exit ends the wait
            os.write(process.master, line)
        return await asyncio.shield(self._ended)

    def _send_rest(self, process: Spawned) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(process.commands, self._unsent) :]
        except BlockingIOError:
            loop.add_writer(process.commands, self._send_rest, process)
            return
        except OSError:
            self._unsent = b""
        loop.remove_writer(process.commands)

    async def _end_command(self) -> Marker | None:
        """Interrupt what runs, then kill it; None where the shell itself has to go."""
        process, ended = self._process, self._ended
        if process is None or ended is None:
            return None
        self._signal(process, signal.SIGINT)
        if await _within(ended, self._limits.interrupt_grace_s):
            return ended.result()
        deadline = time.monotonic() + self._limits.kill_grace_s
        while time.monotonic() < deadline:
            group = self._signal(process, signal.SIGKILL)
            if await _within(ended, _KILL_EVERY_S):
                return ended.result()
            if group:  # what the shell would start next from the same command
                self._signal(process, signal.SIGINT)
        return None

    def _signal(self, process: Spawned, number: signal.Signals) -> int:
        """Signal the terminal's foreground group, but never kill the shell's own; the group signalled, else 0."""
        with contextlib.suppress(OSError):
            group = os.tcgetpgrp(process.master)
            if group > 1 and (group != self._own_group or number != signal.SIGKILL):
                os.killpg(group, number)
                return group
        return 0

    def _on_readable(self, process: Spawned) -> None:
        for _ in range(_READS_A_TURN):
            try:
                data = os.read(process.master, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:  # EIO: no process holds the terminal any more
                asyncio.get_running_loop().remove_reader(process.master)
                return
            self._take(data)

    def _take(self, data: bytes) -> None:
        ended, scanner = self._ended, self._scanner
        if scanner is None or ended is None or ended.done():
            self._output.add(data)  # of a background job: shown with the next command
            return
        try:
            marker = scanner.feed(data)
        except ValueError:
            ended.set_result(None)
            return
        if marker is not None:
            ended.set_result(marker)

    def _on_exit(self, process: Spawned) -> None:
        if process is not self._process:
            return
        self._on_readable(process)
        if self._scanner is not None and self._ended is not None and not self._ended.done():
            self._scanner.flush()
            self._ended.set_result(None)

    def _drop(self, process: Spawned) -> None:
        """Close this side of the terminal; what still runs there loses it."""
        if process is not self._process:
            return
        self._process = None
        self._spawner.kill(process.pid, self._token)
        loop = asyncio.get_running_loop()
        for descriptor in (process.master, process.commands):
            loop.remove_reader(descriptor)
            loop.remove_writer(descriptor)
        process.close()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _said(self) -> str:
        return self._output.text().strip()[-2000:] or "(nothing)"


async def _within(future: asyncio.Future[Marker | None], seconds: float) -> bool:
    """Wait for a future without ending it; True when it is done."""
    done, _ = await asyncio.wait((future,), timeout=seconds)
    return bool(done)
