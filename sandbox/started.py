"""What the spawner has started, as its worker holds it: process ids, descriptors, and the exit to come."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from sandbox.errors import SandboxError


def exit_code(status: int) -> int:
    """An exit as shells tell it: the program's own code, or 128 + N where signal N ended it (`status` is -N)."""
    return status if status >= 0 else 128 - status


@dataclass(frozen=True)
class Spawned:
    """A process on its own pty.

    Args:
        pid: as this process sees it; also its process group and session.
        master: the pty's master, non-blocking; whoever holds this record closes it.
        commands: write end of the pipe that the process reads at descriptor 9, non-blocking; closed likewise.
        exited: the exit code (negative: the signal), once the process and what was settled with it are gone.
    """

    pid: int
    master: int
    commands: int
    exited: asyncio.Future[int]

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.master)
        os.close(self.commands)


@dataclass(frozen=True)
class Piped:
    """A program that runs with pipes; whoever holds this record closes the descriptors, which are non-blocking.

    Args:
        pid: as this process sees it; also its process group and session.
        input: write end of its stdin.
        output: read end of its stdout and stderr.
        report: read end of the pipe at its descriptor 3.
        exited: the exit code (negative: the signal), once it and all of its session are gone.
    """

    pid: int
    input: int
    output: int
    report: int
    exited: asyncio.Future[int]

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self.input, self.output, self.report):
            os.close(descriptor)


@dataclass(frozen=True)
class Joined:
    """A program that runs in a sandbox beside its shell; whoever holds this record closes the descriptors.

    Args:
        pid: as this process sees it; also its process group and session.
        channels: sockets, non-blocking, each connected to one that the program listens on.
        output: read end of its stdout and stderr, non-blocking.
        exited: the exit code (negative: the signal).
    """

    pid: int
    channels: tuple[int, ...]
    output: int
    exited: asyncio.Future[int]

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (*self.channels, self.output):
            os.close(descriptor)


@dataclass(frozen=True)
class Listening:
    """A socket that listens on a sandbox's own loopback; no process belongs to it.

    Args:
        descriptor: non-blocking; whoever holds this record closes it.
        pid: 0, for there is none.
    """

    descriptor: int
    pid: int = 0

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


Started = Spawned | Piped | Joined | Listening
"""What the spawner can start."""


async def gone(
    process: Spawned | Piped | Joined, what: str, within_s: float, error: type[SandboxError] = SandboxError
) -> None:
    """Wait until a process that was killed is gone.

    Raises:
        SandboxError: it is still there after `within_s`; of the class `error`.
    """
    try:
        async with asyncio.timeout(within_s):
            await asyncio.shield(process.exited)
    except TimeoutError as late:
        raise error(f"{what} {process.pid} is still there {within_s} s after SIGKILL", boundary="stop") from late
