"""The supervisor's side of the fork server: asks it for processes, and holds each that it gave by a descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

from launch.errors import LaunchError
from launch.kinds import supervised

PACKET: Final = 64 * 1024
_EVERY: Final = ("launch.bodies", "launch.failures", "stages.web", "workflows.tasks.lines")
_WORKER: Final = (*_EVERY, "sandbox.choose", "sandbox.pty_backend", "stages.store", "stages.worker")
MODULES: Final = {
    "router": (*_EVERY, "stages.router.service", "stages.images", "stages.router.served"),
    "init": (*_WORKER, "stages.pools.init"),
    "run": (*_WORKER, "stages.chat", "stages.engine_client", "stages.model_files", "stages.pools.run"),
    "eval": (*_WORKER, "stages.pools.run", "sandbox.protect"),
}
"""What a kind of process imports anyway. Arrow is not among it: it starts threads, which a fork leaves behind."""
START_S: Final = 60.0
"""For a process, and for the imports of the server before its first: a node's first read of them may come over NFS."""
REPORT_S: Final = 1.0
"""How much later than a process's end its exit code may be told."""
_NAMES: Final = 512
"""Characters of a command line that a forked process may show as its own."""


class Process(Protocol):
    """One process of a run, as its supervisor holds it; asyncio's own is one too."""

    async def wait(self) -> int:
        """The exit code, once it has ended; negative for a signal."""
        ...

    def send_signal(self, signal: int) -> None:
        """Raises ProcessLookupError where it has ended."""
        ...

    def kill(self) -> None:
        """SIGKILL; see `send_signal`."""
        ...


class ForkError(LaunchError):
    """The fork server cannot give a process; it is to be started in the ordinary way."""


class Forked:
    """A process that the server has forked."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid, self._descriptor = pid, descriptor
        loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = loop.create_future()
        self.code: asyncio.Future[int] = loop.create_future()
        loop.add_reader(descriptor, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._gone.set_result(None)

    async def wait(self) -> int:
        """See Process; -9 where the server ended before it could tell."""
        await asyncio.shield(self._gone)
        await asyncio.wait({self.code}, timeout=REPORT_S)
        return self.code.result() if self.code.done() else -signal.SIGKILL

    def send_signal(self, signal_: int) -> None:
        """See Process."""
        if self._gone.done():
            raise ProcessLookupError
        signal.pidfd_send_signal(self._descriptor, signal_)

    def kill(self) -> None:
        """See Process."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Forks processes of these kinds; started by `begin` or by the first `fork`, started again where it died.

    Args:
        kinds: of `launch.forkserver.MODULES`.
    """

    body: Final = "launch.process"
    """The module that its processes run."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self.kinds = frozenset(kinds) & MODULES.keys()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._next = 0
        self._beginning = asyncio.Lock()
        self._asked: dict[int, asyncio.Future[Forked]] = {}
        self._running: dict[int, Forked] = {}

    def begin(self) -> None:
        """Start importing now. Only from the thread that the event loop is to run in: the server ends with that."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            words = [str(there.fileno()), ",".join(sorted(self.kinds)), "." * _NAMES]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "launch.forkserver", *words], pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                env=supervised(),
            )  # fmt: skip
        here.setblocking(False)
        self._link = here

    async def fork(self, words: Sequence[str], log: Path) -> Forked:
        """A process with these arguments of `launch.process`, whose output goes to the end of `log`.

        Raises:
            ForkError: the server is gone, or does not answer.
        """
        loop = asyncio.get_running_loop()
        async with self._beginning:  # all that a server had forked end with it, and are asked for again together
            if self._link is None:
                await self._reap()
                self.begin()
        assert self._link is not None
        loop.add_reader(self._link, self._on_readable, self._link)
        number = self._next = self._next + 1
        asked: asyncio.Future[Forked] = loop.create_future()
        self._asked[number] = asked
        packet = json.dumps({"id": number, "words": list(words), "log": str(log)}).encode()
        try:
            async with asyncio.timeout(START_S):
                await loop.sock_sendall(self._link, packet)
                return await asked
        except (OSError, TimeoutError) as error:
            self._lose(str(error) or f"no answer for {START_S:g} s")
            raise ForkError(f"the fork server gives no process: {error}") from error
        finally:
            self._asked.pop(number, None)

    def _on_readable(self, link: socket.socket) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(link, PACKET, 1)
        except BlockingIOError:
            return
        except OSError:
            packet, descriptors = b"", []
        if not packet:
            self._lose("it has ended")
            return
        said = json.loads(packet)
        if "exit" in said:
            forked = self._running.pop(said["exit"])
            forked.code.set_result(said["code"])
            return
        forked = self._running[said["pid"]] = Forked(said["pid"], descriptors[0])
        asked = self._asked.get(said["id"])
        if asked is None or asked.done():
            forked.kill()  # nobody waits for it any more
        else:
            asked.set_result(forked)

    def _lose(self, reason: str) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop().remove_reader(link)
        link.close()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ForkError(f"the fork server gives no process: {reason}"))
        self._running.clear()

    async def aclose(self) -> None:
        """End the server; those that it forked have ended before, or end now. Idempotent."""
        self._lose("it was closed")
        await self._reap()

    async def _reap(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)
