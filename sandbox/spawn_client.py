"""The worker's side of the spawner process: asks for shells without ever blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sandbox import leftovers
from sandbox.errors import SpawnerError
from sandbox.started import Joined, Listening, Piped, Spawned, Started

MESSAGE_BYTES = 192 * 1024
_MOST_DESCRIPTORS = 8
_KEPT = ("PATH", "SLURM_JOB_ID")
"""What the spawner itself is told of this process's environment; sandboxes get none of it."""
_MAIN = "import sys; sys.path[:0] = sys.argv[2:]; from sandbox.spawner import main; main()"


class SpawnClient:
    """One spawner process, started at first use and ended by `close`; belongs to one event loop."""

    def __init__(self) -> None:
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._next = 0
        self._asked: dict[int, tuple[type[Started], asyncio.Future[Started]]] = {}
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._outbox: deque[bytes] = deque()
        self._full = False  # the socket, when last written to
        self._owned: list[Path] = []
        self._limits: dict[str, Any] | None = None
        self.losses = 0  # spawners that have ended, each with all that it had started
        self._beside: dict[int, set[int]] = {}  # a sandbox's first process -> those that joined its namespaces

    def own(self, path: Path) -> None:
        """Have a directory removed when this process dies without removing it."""
        self._owned.append(path)
        if self._link is not None:
            self._send({"op": "own", "path": str(path)})

    def limit(self, limits: Mapping[int, int], processes: int | None) -> None:
        """Give every process that is started from now on resource limits.

        Args:
            limits: kind -> value, each for one process.
            processes: most processes in a sandbox, for those that join its namespaces; None: unlimited.
        """
        self._limits = {"op": "limit", "limits": {str(kind): value for kind, value in limits.items()}}
        self._limits["processes"] = processes
        if self._link is not None:
            self._send(self._limits)

    def beside(self, sandbox: int) -> frozenset[int]:
        """The processes that run and joined the namespaces of a process that was spawned."""
        return frozenset(pid for pid in self._beside.get(sandbox, ()) if pid in self._exits)

    async def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, timeout_s: float, light: bool = False
    ) -> Spawned:
        """Start a program on a new pty, echo and output processing off.

        `light` is for a program that forks nothing before its first command: it starts at a fraction of the cost.

        Raises:
            SpawnerError: it did not start within the deadline, or the spawner is gone.
        """
        started = await self._ask("spawn", Spawned, argv, env, cwd, timeout_s, light=light)
        assert isinstance(started, Spawned)
        return started

    async def execute(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, timeout_s: float, token: str | None
    ) -> Piped:
        """Start a program with pipes for input, output and report, in a session of its own.

        Its exit is told when all of its session is gone, and all that carry `token` in their environment.

        Raises:
            SpawnerError: it did not start within the deadline, or the spawner is gone.
        """
        started = await self._ask("execute", Piped, argv, env, cwd, timeout_s, token=token)
        assert isinstance(started, Piped)
        return started

    async def join(
        self, sandbox: int | None, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, directory: str,
        share: str | None, timeout_s: float,
    ) -> Joined:  # fmt: skip
        """Start a program in a sandbox that runs already, with sockets to it: see sandbox.joining.

        Args:
            sandbox: the pid of a spawned process that holds namespaces; None for a program without any.
            argv: looked up in the sandbox, along PATH of `env`.
            env: its whole environment.
            cwd: a directory of the sandbox.
            directory: of this machine, where the sockets have names for a moment.
            share: a directory of this machine that it gets read-only at the last descriptor.
            timeout_s: of the start.

        Raises:
            SpawnerError: it could not be started, or the spawner is gone.
        """
        started = await self._ask(
            "join", Joined, argv, env, cwd, timeout_s, pid=sandbox, directory=directory, share=share
        )
        assert isinstance(started, Joined)
        return started

    async def join_terminal(
        self, sandbox: int | None, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, timeout_s: float,
        plain: bool = True, rows: int = 50, columns: int = 200,
    ) -> Spawned:  # fmt: skip
        """Start a program in a sandbox that runs already, on a terminal of its own.

        Args:
            sandbox: as of `join`.
            argv: as of `join`.
            env: its whole environment.
            cwd: a directory of the sandbox.
            timeout_s: of the start.
            plain: echo and output processing off, and the command pipe at its descriptor 9, as `spawn` has it.
            rows: of the terminal.
            columns: of the terminal.

        Raises:
            SpawnerError: it could not be started, or the spawner is gone.
        """
        started = await self._ask(
            "terminal", Spawned, argv, env, cwd, timeout_s, pid=sandbox, plain=plain, rows=rows, columns=columns
        )
        assert isinstance(started, Spawned)
        return started

    async def listen(self, sandbox: int, *, timeout_s: float) -> Listening:
        """A socket that listens on the loopback of a spawned process's namespaces: see sandbox.joining.

        Raises:
            SpawnerError: it could not be made, or the spawner is gone.
        """
        made = await self._ask("listen", Listening, ("a socket",), {}, "/", timeout_s, sandbox=sandbox)
        assert isinstance(made, Listening)
        return made

    async def _ask(
        self, operation: str, kind: type[Started], argv: Sequence[str], env: Mapping[str, str], cwd: str,
        timeout_s: float, **more: str | int | None,
    ) -> Started:  # fmt: skip
        self._ensure()
        number = self._next = self._next + 1
        answer: asyncio.Future[Started] = asyncio.get_running_loop().create_future()
        self._asked[number] = (kind, answer)
        self._send({"op": operation, "id": number, "argv": list(argv), "env": dict(env), "cwd": cwd, **more})
        try:
            async with asyncio.timeout(timeout_s):
                started = await asyncio.shield(answer)
        except TimeoutError as error:
            answer.add_done_callback(self._discard)
            late = f"the spawner did not start {argv[0]} within {timeout_s} s"
            raise SpawnerError(late, boundary="spawner") from error
        except asyncio.CancelledError:
            answer.add_done_callback(self._discard)
            await self._over(answer, timeout_s)
            raise
        if isinstance(sandbox := more.get("pid"), int):
            self._beside.setdefault(sandbox, set()).add(started.pid)
        return started

    def refuse_lost(self, losses: int) -> None:
        """Raise SpawnerError where there were fewer losses then: how anything of that time ended says nothing."""
        if self.losses != losses:
            raise SpawnerError("the spawner was lost, and what it had started with it", boundary="spawner")

    def settle(self, pid: int) -> None:
        """Say that a start is complete: the exit is told only when the children that it has now are gone too."""
        if pid in self._exits:
            self._send({"op": "settle", "pid": pid})

    def interrupt(self, pid: int) -> None:
        """SIGINT to the group of a process that was started here."""
        if self._link is not None and pid in self._exits:
            self._send({"op": "interrupt", "pid": pid})

    def kill(self, pid: int, token: str | None = None, remove: Path | None = None) -> None:
        """SIGKILL a spawned process with its group, and every process started with `token` in its environment.

        The directory `remove` goes before the exit is told, where that is done soon; else it is left.
        """
        if self._link is not None and (pid in self._exits or token):
            self._send({"op": "kill", "pid": pid, "token": token, "remove": None if remove is None else str(remove)})

    async def close(self, timeout_s: float = 15.0) -> None:
        """End the spawner, and with it everything that it started; idempotent."""
        process = self._process
        self._lose("the spawner was closed")
        if process is None:
            return
        self._process = None
        try:
            await asyncio.wait_for(asyncio.to_thread(process.wait, timeout_s), timeout_s + 1)
        except (TimeoutError, subprocess.TimeoutExpired):
            process.kill()
            await asyncio.to_thread(process.wait)

    def _ensure(self) -> None:
        if self._link is not None:
            return
        if self._process is not None:  # its socket ended: a zombie by now, or to be killed
            self._process.kill()
            self._process.wait()
        origin = importlib.util.find_spec("ptyprocess")
        if origin is None or origin.origin is None:
            raise SpawnerError("ptyprocess is not installed: run `uv sync`", boundary="spawner")
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package, third_party = Path(__file__).parent.parent, Path(origin.origin).parent.parent
        command = [sys.executable, "-I", "-S", "-c", _MAIN, str(there.fileno()), str(package), str(third_party)]
        environment = {"PATH": "/usr/bin:/bin"} | {name: os.environ[name] for name in _KEPT if name in os.environ}
        # From the loop's own thread: the spawner's parent-death signal belongs to the thread that started it.
        self._process = subprocess.Popen(
            command, pass_fds=(there.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            start_new_session=True, cwd="/", env=environment | {leftovers.VARIABLE: leftovers.identity()},
        )  # fmt: skip
        there.close()
        here.setblocking(False)
        self._link = here
        asyncio.get_running_loop().add_reader(here, self._on_readable)
        for path in self._owned:
            self._send({"op": "own", "path": str(path)})
        if self._limits is not None:
            self._send(self._limits)

    def _send(self, message: dict[str, Any]) -> None:
        try:  # a tenth of the standard library's time, which alone writes names that are no UTF-8
            packet = msgspec.json.encode(message)
        except UnicodeEncodeError:
            packet = json.dumps(message).encode()
        if len(packet) > MESSAGE_BYTES:
            raise SpawnerError(
                f"arguments and environment take {len(packet)} bytes; at most {MESSAGE_BYTES} pass", boundary="spawner"
            )
        self._outbox.append(packet)
        self._flush()

    def _flush(self) -> None:
        if self._link is None:
            return
        loop = asyncio.get_running_loop()
        while self._outbox:
            try:
                self._link.send(self._outbox[0])
            except BlockingIOError:
                loop.add_writer(self._link, self._flush)
                self._full = True
                return
            except OSError as error:
                self._lose(f"the spawner is gone: {error}")
                return
            self._outbox.popleft()
        if self._full:
            self._full = False
            loop.remove_writer(self._link)

    def _on_readable(self) -> None:
        link = self._link
        while link is not None and link is self._link:
            try:
                packet, descriptors, _, _ = socket.recv_fds(link, MESSAGE_BYTES, _MOST_DESCRIPTORS)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(f"the spawner is gone: {error}")
                return
            if not packet:
                self._lose("the spawner is gone: its socket ended")
                return
            self._on_message(json.loads(packet), descriptors)

    def _on_message(self, message: dict[str, Any], descriptors: Sequence[int]) -> None:
        if "exit" in message:
            exited = self._exits.pop(message["exit"], None)
            self._beside.pop(message["exit"], None)
            if exited is not None and not exited.done():
                exited.set_result(message["status"])
            return
        kind, answer = self._asked.pop(message["id"])
        if "error" in message:
            if not answer.done():
                answer.set_exception(SpawnerError(message["error"], boundary="spawner"))
            return
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
        if kind is Listening:
            answer.set_result(Listening(descriptors[0]))
            return
        exited = self._exits[message["pid"]] = asyncio.get_running_loop().create_future()
        if kind is Joined:
            *channels, output = descriptors
            answer.set_result(Joined(message["pid"], tuple(channels), output, exited))
        elif kind is Spawned:
            master, commands = descriptors
            answer.set_result(Spawned(message["pid"], master, commands, exited))
        else:
            given, output, report = descriptors
            answer.set_result(Piped(message["pid"], given, output, report, exited))

    def _discard(self, answer: asyncio.Future[Started]) -> None:
        """A start that nobody waits for any more."""
        if not answer.cancelled() and answer.exception() is None:
            spawned = answer.result()
            spawned.close()
            self.kill(spawned.pid)

    async def _over(self, answer: asyncio.Future[Started], within_s: float) -> None:
        """Wait until a start that nobody wants any more is over: whatever comes next finds nothing of it."""
        with contextlib.suppress(TimeoutError, SpawnerError):
            async with asyncio.timeout(within_s):
                started = await asyncio.shield(answer)
                if not isinstance(started, Listening):
                    await asyncio.shield(started.exited)

    def _lose(self, reason: str) -> None:
        if self._link is None:
            return
        link, self._link = self._link, None
        self.losses += 1
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            loop = asyncio.get_running_loop()
            loop.remove_reader(link)
            loop.remove_writer(link)
        link.close()
        self._outbox.clear()
        asked, self._asked = self._asked, {}
        for _, answer in asked.values():
            if not answer.done():
                answer.set_exception(SpawnerError(reason, boundary="spawner"))
        exits, self._exits = self._exits, {}
        for exited in exits.values():
            if not exited.done():
                exited.set_result(-9)
