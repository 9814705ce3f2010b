"""What differs between backends that run bash on a pty: where the root is, how to enter it, what was changed in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sandbox.protocols import SandboxSpec


@dataclass(frozen=True)
class Entry:
    """How a program is started: command line, environment, and the directory that it is started from.

    Where its launchers can be ended by a signal that its exit status does not tell, they leave a note.

    Args:
        argv: the command line.
        env: its environment.
        cwd: where it is started.
        note: the file that then holds `ended`, if the program has ended by itself.
        ended: what the file holds.
        given: bytes and names in the sandbox's directory that its ground put there: no use of the agent's.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    note: Path | None = None
    ended: str = ""
    given: tuple[int, int] = (0, 0)

    def torn(self) -> bool:
        """Whether something outside the sandbox has ended what was started; false where that is not known."""
        if self.note is None:
            return False
        try:
            return self.note.read_text(errors="replace") != self.ended
        except OSError:
            return False


class Ground(Protocol):
    """One sandbox's place on this node. Methods block for milliseconds and are called in a thread."""

    @property
    def directory(self) -> Path:
        """The sandbox's own directory; removed at its stop."""
        ...

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
        ...

    @property
    def token(self) -> str | None:
        """NAME=value that marks its processes, where no process namespace holds them."""
        ...

    @property
    def prefix(self) -> str:
        """What stands before every path of the sandbox, as its shell names it; empty where its root is "/"."""
        ...

    def workspace(self) -> tuple[str, ...]:
        """The workspace directories, as the shell names them."""
        ...

    def prepare(self) -> Entry:
        """Make the directories; called once before the first start."""
        ...

    def prepare_at_once(self) -> Entry | None:
        """In the place of `prepare` where that takes a few system calls; None where a thread is to do it."""
        ...

    def enter(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> Entry:
        """How a program is started in bash's place, with namespaces of its own; pure, called after `prepare`.

        Descriptors 0 to 3 reach the program; when it ends, or what was started is killed, all that it left must end.

        Args:
            argv: the program by its absolute path, and its arguments.
            env: its environment.
            cwd: a directory of the sandbox.
        """
        ...

    def root(self, pid: int) -> Path:
        """The sandbox's root as this process reaches it, while process `pid` of it runs."""
        ...

    def untouched(self) -> bool:
        """Whether it is certain that nothing was changed since the start; at most microseconds, no thread is needed."""
        ...

    def keeps(self) -> bool:
        """Whether the directory is to be handed on if nothing was changed; asked while it is in use."""
        ...

    def hand_on(self) -> bool:
        """Leave the directory to another sandbox, where nothing was changed; what ran in it is gone.

        False where it is to be removed. Both take microseconds, no thread is needed.
        """
        ...

    def trees(self) -> Mapping[bytes, Path]:
        """The changes to pack: mount point relative to the root (b"" for the root) -> directory in overlay format."""
        ...
