"""Bytes on their way into a descriptor that may take only some: written as far as it goes, the rest by the loop."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import termios


class Outbox:
    """Belongs to one event loop and one non-blocking descriptor, which others close."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unsent: bytes | memoryview = b""
        self._waits = False

    def send(self, data: bytes) -> None:
        """Write it; what was not written yet of the data before is dropped."""
        self._unsent = data
        self._flush()

    def is_read(self) -> bool:
        """Whether all that was sent has been read from the pipe that the descriptor is an end of."""
        left = array.array("i", [0])
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._descriptor, termios.FIONREAD, left)
        return not self._unsent and left[0] == 0

    def close(self) -> None:
        """Forget the rest."""
        self._unsent = b""
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                written = os.write(self._descriptor, self._unsent)
                self._unsent = memoryview(self._unsent)[written:] if written < len(self._unsent) else b""
        except BlockingIOError:
            if not self._waits:
                self._waits = True
                asyncio.get_running_loop().add_writer(self._descriptor, self._flush)
            return
        except OSError:  # nobody reads any more
            self._unsent = b""
        if self._waits:
            self._waits = False
            asyncio.get_running_loop().remove_writer(self._descriptor)
