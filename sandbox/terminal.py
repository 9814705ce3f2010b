"""One persistent bash on a pty, driven by the event loop: commands in, results out, time-outs that always end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from sandbox.bashtext import NONCE_CHARS, command_packet, setup_packet, setup_script
from sandbox.errors import SandboxError, ShellDied
from sandbox.foreground import orphaned, signal_foreground
from sandbox.marker import BoundedOutput, Marker, MarkerScanner
from sandbox.modes import Modes
from sandbox.outbox import Outbox
from sandbox.protocols import CommandResult, SandboxLimits, ShellState
from sandbox.shellstate import STATE_COMMAND, moved, read_state
from sandbox.spawn_client import SpawnClient
from sandbox.started import Spawned, exit_code, gone

_READ_BYTES = 4096  # a terminal gives at most 4095 bytes a read
_READS_A_TURN = 16  # then other callbacks have their turn: a shell that floods must not starve the loop
_FULL_READ = 4000  # less was all that there was
_KILL_EVERY_S = 0.05
TIMED_OUT_EXIT = 124
_STATE_BYTES = 16 * 1024 * 1024  # more than the kernel lets a process hand on

Launch = Callable[[], Awaitable[Spawned]]  # starts the sandbox's bash anew on the same files


class Terminal:
    """A Shell over a spawned bash; belongs to one event loop.

    Args:
        spawner: kills what was launched.
        launch: starts a bash; called again when one was lost.
        workspace: directories to make before the first command; the first is where the shell starts.
        limits: output bound and graces.
        token: NAME=value that marks what its kill ends too, where no namespace holds the sandbox's processes together.
        holds: the process that is launched holds the sandbox's namespaces: a signal that ends it came from outside.
        torn: whether what was launched was ended from outside, where no signal tells.
        root: what stands before every path of the sandbox; empty where its root is "/".
        state: what the first shell starts from.
    """

    def __init__(
        self, spawner: SpawnClient, launch: Launch, workspace: tuple[str, ...], limits: SandboxLimits,
        token: str | None = None, *, holds: bool = True, torn: Callable[[], bool] = lambda: False, root: str = "",
        state: ShellState | None = None,
    ) -> None:  # fmt: skip
        self._spawner, self._launch, self._limits, self._token, self._holds = spawner, launch, limits, token, holds
        self._torn = torn
        # A shell that goes on finds the directories as they were left, also where they are gone.
        self._workspace, self._root = workspace if state is None else (), root
        first = moved(state or ShellState(workspace[0] if workspace else "/", "", root), root)
        self._cwd, self._first = first.cwd, first if state else None
        self.lock = asyncio.Lock()  # its holder alone starts a shell or uses one
        self._process: Spawned | None = None
        self.prompted = asyncio.Event()  # set while a shell lives that has been at a prompt
        self._started, self._lost, self._ended_by, self._own_group = False, False, "", 0
        self.ended_for: SandboxError | None = None
        self._modes: Modes | None = None
        self._output = BoundedOutput(limits.output_bytes)
        # The command in flight: its scanner until it has ended, then its marker (None: the shell ended instead).
        self._scanner: MarkerScanner | None = None
        self._marker: Marker | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline, self._cancelled = 0.0, False
        self._commands: Outbox | None = None

    @property
    def process(self) -> Spawned | None:
        """The bash that runs now."""
        return self._process

    @property
    def cwd(self) -> str:
        """Where the last command left it."""
        return self._cwd

    async def start(self) -> None:
        """Launch bash and set it up, where none runs; the first `run` does it too.

        Raises:
            ShellDied: it ended before its first prompt; the message holds what it printed.
        """
        async with self.lock:
            if self._process is not None and self._process.exited.done():
                self.refuse_if_ended()
                await self.kill()
            if self._process is None:
                self._lost = self._started  # the next command says so
                await self._start()

    async def close(self) -> None:
        """See `Shell.close`; a shell that ends is started again by its next command."""
        await self.kill()

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
            packet, line = command_packet(command, nonce := os.urandom(NONCE_CHARS // 2).hex())
        except ValueError as error:
            return CommandResult(2, f"{error}\n", self._cwd, 0.0, restarted=restarted)
        self._cancelled = True  # until the contrary is known: a cancelled call leaves its command running
        self._send(packet, nonce, line)
        timed_out = not await self._wait(timeout_s)
        if timed_out:
            await self._end_command()
        if self.ended_for is not None:  # the shell may still say how its children died: what was cut off has no result
            raise self.ended_for
        process, end = self._process, self._marker
        if process and end and self._token is None and await orphaned(process, end.exit_code):
            await gone(process, "shell", self._limits.start_s, ShellDied)
            self.refuse_if_ended()
            self._marker = None  # what is being killed takes its last command's word along
        exit_code, output = self._exit_code(timed_out), self._output
        if self._marker is not None:
            self._accept(self._marker)
        else:
            await self._restart()
            restarted = True
        spent_s = time.perf_counter() - started
        return CommandResult(exit_code, output.text(), self._cwd, spent_s, output.truncated, timed_out, restarted)

    async def kill(self, remove: Path | None = None) -> None:
        """SIGKILL the shell and all in its sandbox, and wait until they are gone; idempotent; see SpawnClient.kill.

        Raises:
            ShellDied: something is still there at the deadline.
        """
        if (process := self._process) is None:
            return
        self._drop(process, remove)
        await gone(process, "shell", self._limits.start_s, ShellDied)

    async def _start(self) -> None:
        process = await self._launch()
        self._process, self._commands = process, Outbox(process.commands)
        asyncio.get_running_loop().add_reader(process.master, self._on_readable, process)
        process.exited.add_done_callback(lambda _: self._on_exit(process))
        self._output = BoundedOutput(self._limits.output_bytes)
        try:
            # A shell that is started again has the sandbox's own variables.
            first = None if self._started else self._first
            script = setup_script(self._workspace, self._cwd, first, in_job="SLURM_JOB_ID" in os.environ)
            packet, line = setup_packet(script, nonce := os.urandom(NONCE_CHARS // 2).hex())
            self._send(packet, nonce, line)
            ended = await self._wait(self._limits.start_s)
        except asyncio.CancelledError:
            with contextlib.suppress(ShellDied):
                await self.kill()
            raise
        if (marker := self._marker) is None:
            said = self._output.text().strip()[-2000:] or "(nothing)"
            await self.kill()
            what = "ended before its first prompt" if ended else f"gave no prompt within {self._limits.start_s} s"
            raise self.ended_for or ShellDied(f"the shell {what}; the terminal said: {said}", boundary="start")
        self._own_group = os.tcgetpgrp(process.master)
        self._modes = Modes(process.master)
        if self._token is None:  # with one the process is bash itself, which has started nothing yet
            self._spawner.settle(process.pid)
        self._started = True
        self.prompted.set()
        self._accept(marker)

    async def _ready(self) -> bool:
        """Bring the shell to a prompt, also after a cancelled command; True where it was lost and started again."""
        self.refuse_if_ended()
        if self._process is None:
            lost = self._started
            await self._start()
            return lost
        lost, self._lost = self._lost, False
        if self._cancelled:
            await self._end_command()
            if self._marker is None:
                await self._restart()
                return True
            self._accept(self._marker)
        return lost

    async def _restart(self) -> None:
        self.refuse_if_ended()
        await self.kill()
        try:
            await self._start()
        except ShellDied as error:
            raise ShellDied(f"the shell was lost and does not start again: {error}", boundary="shell") from error

    def refuse_if_ended(self) -> None:
        """A sandbox that was ended from outside is lost: another shell would go on without its state."""
        if self.ended_for is not None:
            raise self.ended_for
        if self._ended_by:
            raise ShellDied(f"the sandbox was ended from outside by {self._ended_by}", boundary="shell")

    def _accept(self, marker: Marker) -> None:
        """The shell is at its prompt; what comes from now on belongs to the next command."""
        self._cwd = marker.cwd
        self._output = BoundedOutput(self._limits.output_bytes)
        self._cancelled = False

    def _exit_code(self, timed_out: bool) -> int:
        if self._marker is not None:
            return self._marker.exit_code
        if timed_out or self._process is None or not self._process.exited.done():
            return TIMED_OUT_EXIT
        return exit_code(self._process.exited.result())

    def _send(self, packet: bytes, nonce: str, line: bytes) -> None:
        process = self._process
        assert process is not None
        self._scanner, self._marker = MarkerScanner(nonce, self._output), None
        if process.exited.done():
            self._on_exit(process)
            return
        if self._commands is not None:
            self._commands.send(packet)
        with contextlib.suppress(OSError):  # a dead shell: its exit ends the wait
            if self._modes is not None:
                self._modes.restore()
            os.write(process.master, line)

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
        else:
            self._wake()

    async def _end_command(self) -> None:
        """Interrupt what runs, then kill it; leaves no marker where the shell itself has to go."""
        process, commands = self._process, self._commands
        if process is None or commands is None or self._scanner is None:
            return
        if not commands.is_read():  # else the shell reports: a marker that is interrupted is lost, or told twice
            signal_foreground(process.master, signal.SIGINT, self._own_group)
        if await self._wait(self._limits.interrupt_grace_s):
            return
        deadline = time.monotonic() + self._limits.kill_grace_s
        while time.monotonic() < deadline:
            killed = signal_foreground(process.master, signal.SIGKILL, self._own_group)
            if await self._wait(_KILL_EVERY_S):
                return
            if killed and not commands.is_read():  # what the shell would start next from the same command
                signal_foreground(process.master, signal.SIGINT, self._own_group)

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
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _on_exit(self, process: Spawned) -> None:
        if process is not self._process:
            return
        self.prompted.clear()
        if self._holds:  # what is outside of the namespaces cannot be signalled by anything in them
            status = process.exited.result()
            self._ended_by = f"signal {-status}" if status < 0 else "a signal" if self._torn() else ""
        while self._read(process):
            pass
        if self._scanner is not None:
            self._scanner.flush()
            self._end(None)

    def _drop(self, process: Spawned, remove: Path | None = None) -> None:
        """Kill it and close this side of its terminal."""
        self._process, self._modes = None, None  # the next one's terminal has its own
        self.prompted.clear()
        self._spawner.kill(process.pid, self._token, remove)
        asyncio.get_running_loop().remove_reader(process.master)
        if self._commands is not None:
            self._commands.close()
        process.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._end(None)
