"""A terminal's modes as they were at its first prompt: looked at before each command, set where they have changed."""

from __future__ import annotations

import fcntl
import termios

_BYTES = 64  # more than any architecture's record of modes; what the kernel does not fill stays zero


class Modes:
    """Belongs to one terminal, whose descriptor others close.

    Args:
        terminal: its master.

    Raises:
        OSError: it is no terminal, or nobody holds its other end.
    """

    def __init__(self, terminal: int) -> None:
        self._terminal, self._now = terminal, bytearray(_BYTES)
        fcntl.ioctl(terminal, termios.TCGETS, self._now)
        self._first = bytes(self._now)

    def restore(self) -> None:
        """Undo what a program has left, such as echo. Setting wakes the shell up, so it is done only where it must be.

        Raises:
            OSError: as above.
        """
        fcntl.ioctl(self._terminal, termios.TCGETS, self._now)
        if self._now != self._first:
            fcntl.ioctl(self._terminal, termios.TCSETS, self._first)
