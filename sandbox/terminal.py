"""One persistent bash on a pty, driven by the event loop: commands in, results out, time-outs that always end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import termios
import time
from collections.abc import Awaitable, Callable

from sandbox.bashtext import RUN_LINE, SETUP_LINE, command_packet, setup_script
from sandbox.errors import ShellDied
from sandbox.marker import BoundedOutput, Marker, MarkerScanner
from sandbox.protocols import CommandResult, SandboxLimits, ShellState
from sandbox.shellstate import STATE_COMMAND, moved, read_state
from sandbox.spawn_client import SpawnClient, Spawned

_READ_BYTES = 64 * 1024
_READS_A_TURN = 16  # then other callbacks have their turn: a shell that floods must not starve the loop
_FULL_READ = 4000  # a terminal gives at most 4095 bytes a read; less was all that there was
_KILL_EVERY_S = 0.05
TIMED_OUT_EXIT = 124
_STATE_BYTES = 16 * 1024 * 1024  # more than the kernel lets a process hand on

Launch = Callable[[], Awaitable[Spawned]]
"""Starts the sandbox's bash anew on the same files."""


class Terminal:
    """A Shell over a spawned bash; belongs to one event loop.

    Args:
        spawner: kills what was launched.
        launch: starts a bash; called again when one was lost.
        workspace: directories to make before the first command; the first is where the shell starts.
        limits: output bound and graces.
        token: NAME=value that marks the sandbox's processes, where no namespace holds them together.
        root: what stands before every path of the sandbox; empty where its root is "/".
        state: what the first shell starts from.
    """

    def __init__(
        self, spawner: SpawnClient, launch: Launch, workspace: tuple[str, ...], limits: SandboxLimits,
        token: str | None = None, *, root: str = "", state: ShellState | None = None,
    ) -> None:  # fmt: skip
        self._spawner, self._launch, self._limits, self._token = spawner, launch, limits, token
        # A shell that goes on finds the directories as they were left, also where they are gone.
        self._workspace, self._root = workspace if state is None else (), root
        first = moved(state or ShellState(workspace[0] if workspace else "/", "", root), root)
        self._cwd, self._exports = first.cwd, first.exports if state else None
        self.lock = asyncio.Lock()  # who holds it alone starts a shell or uses one
        self._process: Spawned | None = None
        self._started, self._ended_by = False, 0
        self._own_group = 0
        self._modes: list[int | list[bytes | int]] = []
        self._output = BoundedOutput(limits.output_bytes)
        # The command in flight: its scanner until it has ended, then its marker (None: the shell ended instead).
        self._scanner: MarkerScanner | None = None
        self._marker: Marker | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        self._unsent = b""
        self._cancelled = False

    @property
    def process(self) -> Spawned | None:
        """The bash that runs now."""
        return self._process

    async def start(self) -> None:
        """Launch bash and set it up, where that is not done; the first `run` does it too.

        Raises:
            ShellDied: it ended before its first prompt; the message holds what it printed.
        """
        async with self.lock:
            if self._process is None:
                await self._start()

    async def run(self, command: str, timeout_s: float = 30.0) -> CommandResult:
        """See `Shell.run`."""
        async with self.lock:
            return await self._run(command, timeout_s)

    async def state(self) -> ShellState:
        """See `Shell.state`."""
        async with self.lock:
            await self._ready()
            shown, self._output = self._output, BoundedOutput(_STATE_BYTES)
            result = await self._run(STATE_COMMAND, self._limits.start_s)
            self._output = shown
            return read_state(result.output, self._cwd, self._root)

    async def _run(self, command: str, timeout_s: float) -> CommandResult:
        started = time.perf_counter()
        restarted = await self._ready()
        try:
            packet = command_packet(command, nonce := secrets.token_hex(8))
        except ValueError as error:
            return CommandResult(2, f"{error}\n", self._cwd, 0.0, restarted=restarted)
        self._cancelled = True  # until the contrary is known: a cancelled call leaves its command running
        self._send(packet, nonce, RUN_LINE)
        timed_out = not await self._wait(timeout_s)
        if timed_out:
            await self._end_command()
        exit_code, output = self._exit_code(timed_out), self._output
        if self._marker is not None:
            self._accept(self._marker)
        else:
            await self._restart()
            restarted = True
        spent_s = time.perf_counter() - started
        return CommandResult(exit_code, output.text(), self._cwd, spent_s, output.truncated, timed_out, restarted)

    async def kill(self) -> None:
        """SIGKILL the shell and all in its sandbox, and wait until they are gone; idempotent.

        Raises:
            ShellDied: something is still there at the deadline.
        """
        process = self._process
        if process is None:
            return
        self._drop(process)
        try:
            async with asyncio.timeout(self._limits.start_s):
                await asyncio.shield(process.exited)
        except TimeoutError as error:
            raise ShellDied(
                f"process {process.pid} is still there {self._limits.start_s} s after SIGKILL", boundary="stop"
            ) from error

    async def _start(self) -> None:
        process = await self._launch()
        self._process = process
        asyncio.get_running_loop().add_reader(process.master, self._on_readable, process)
        process.exited.add_done_callback(lambda _: self._on_exit(process))
        self._output = BoundedOutput(self._limits.output_bytes)
        try:
            nonce = secrets.token_hex(8)
            # A shell that is started again has the sandbox's own variables.
            exports = None if self._started else self._exports
            script = setup_script(self._workspace, self._cwd, exports, in_job="SLURM_JOB_ID" in os.environ)
            self._send(command_packet(script, nonce), nonce, SETUP_LINE)
            ended = await self._wait(self._limits.start_s)
        except asyncio.CancelledError:
            self._drop(process)
            raise
        marker = self._marker
        if marker is None:
            said = self._output.text().strip()[-2000:] or "(nothing)"
            await self.kill()
            what = "ended before its first prompt" if ended else f"gave no prompt within {self._limits.start_s} s"
            raise ShellDied(f"the shell {what}; the terminal said: {said}", boundary="start")
        self._own_group = os.tcgetpgrp(process.master)
        self._modes = termios.tcgetattr(process.master)
        self._spawner.settle(process.pid)
        self._started = True
        self._accept(marker)

    async def _ready(self) -> bool:
        """Bring the shell to a prompt, also after a cancelled command; True where it was lost and started again."""
        self.refuse_if_ended()
        if self._process is None:
            lost = self._started
            await self._start()
            return lost
        if self._cancelled:
            await self._end_command()
            if self._marker is None:
                await self._restart()
                return True
            self._accept(self._marker)
        return False

    async def _restart(self) -> None:
        self.refuse_if_ended()
        await self.kill()
        try:
            await self._start()
        except ShellDied as error:
            raise ShellDied(f"the shell was lost and does not start again: {error}", boundary="shell") from error

    def refuse_if_ended(self) -> None:
        """A sandbox that was ended from outside is lost: another shell would go on without its state."""
        if self._ended_by:
            raise ShellDied(f"the sandbox was ended from outside by signal {self._ended_by}", boundary="shell")

    def _accept(self, marker: Marker) -> None:
        """The shell is at its prompt; what comes from now on belongs to the next command."""
        self._cwd = marker.cwd
        self._output = BoundedOutput(self._limits.output_bytes)
        self._cancelled = False

    def _exit_code(self, timed_out: bool) -> int:
        if self._marker is not None:
            return self._marker.exit_code
        process = self._process
        if timed_out or process is None or not process.exited.done():
            return TIMED_OUT_EXIT
        status = process.exited.result()
        return status if status >= 0 else 128 - status

    def _send(self, packet: bytes, nonce: str, line: bytes) -> None:
        process = self._process
        assert process is not None
        self._scanner, self._marker = MarkerScanner(nonce, self._output), None
        if process.exited.done():
            self._on_exit(process)
            return
        self._unsent = packet
        self._send_rest(process)
        with contextlib.suppress(OSError, termios.error):  # a dead shell: its exit ends the wait
            if self._modes:  # a program may have left echo on, or the terminal raw
                termios.tcsetattr(process.master, termios.TCSANOW, self._modes)
            os.write(process.master, line)

    def _send_rest(self, process: Spawned) -> None:
        """Write what the command pipe takes now, and the rest when it takes more."""
        try:
            with contextlib.suppress(BlockingIOError):
                self._unsent = self._unsent[os.write(process.commands, self._unsent) :]
        except OSError:
            return
        if not self._unsent:
            return
        asyncio.get_running_loop().add_writer(process.commands, self._on_writable, process)

    def _on_writable(self, process: Spawned) -> None:
        asyncio.get_running_loop().remove_writer(process.commands)
        self._send_rest(process)

    async def _wait(self, timeout_s: float) -> bool:
        """Wait for the end of the command; False where the time came first. One timer serves all commands."""
        if self._scanner is None:
            return True
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        self._deadline = loop.time() + timeout_s
        if self._timer is None or self._timer.when() > self._deadline:
            self._set_timer(loop)
        try:
            await waiter
        finally:
            self._waiter = None
        return self._scanner is None

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self._deadline, self._on_time, loop)

    def _on_time(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is not None and loop.time() < self._deadline:
            self._set_timer(loop)
        elif self._waiter is not None:
            _wake(self._waiter)

    async def _end_command(self) -> None:
        """Interrupt what runs, then kill it; leaves no marker where the shell itself has to go."""
        process = self._process
        if process is None or self._scanner is None:
            return
        self._signal(process, signal.SIGINT)
        if await self._wait(self._limits.interrupt_grace_s):
            return
        deadline = time.monotonic() + self._limits.kill_grace_s
        while time.monotonic() < deadline:
            killed = self._signal(process, signal.SIGKILL)
            if await self._wait(_KILL_EVERY_S):
                return
            if killed:  # what the shell would start next from the same command
                self._signal(process, signal.SIGINT)

    def _signal(self, process: Spawned, number: signal.Signals) -> bool:
        """Signal the terminal's foreground group, but never kill the shell's own."""
        with contextlib.suppress(OSError):
            group = os.tcgetpgrp(process.master)
            if group > 1 and (group != self._own_group or number != signal.SIGKILL):
                os.killpg(group, number)
                return True
        return False

    def _on_readable(self, process: Spawned) -> None:
        for _ in range(_READS_A_TURN):
            if self._read(process) < _FULL_READ:
                return

    def _read(self, process: Spawned) -> int:
        """Take what the terminal gives at once; how many bytes that was."""
        try:
            data = os.read(process.master, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: no process holds the terminal any more
            asyncio.get_running_loop().remove_reader(process.master)
            return 0
        self._take(data)
        return len(data)

    def _take(self, data: bytes) -> None:
        if self._scanner is None:
            self._output.add(data)  # of a background job: shown with the next command
            return
        try:
            marker = self._scanner.feed(data)
        except ValueError:
            self._end(None)
            return
        if marker is not None:
            self._end(marker)

    def _end(self, marker: Marker | None) -> None:
        self._scanner, self._marker = None, marker
        if self._waiter is not None:
            _wake(self._waiter)

    def _on_exit(self, process: Spawned) -> None:
        if process is not self._process:
            return
        if self._token is None:  # what holds a namespace of its own cannot be signalled by anything in it
            self._ended_by = max(0, -process.exited.result())
        while self._read(process):
            pass
        if self._scanner is not None:
            self._scanner.flush()
            self._end(None)

    def _drop(self, process: Spawned) -> None:
        """Kill it and close this side of its terminal."""
        self._process = None
        self._spawner.kill(process.pid, self._token)
        for descriptor in (process.master, process.commands):
            asyncio.get_running_loop().remove_reader(descriptor)
            asyncio.get_running_loop().remove_writer(descriptor)
        process.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._end(None)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
