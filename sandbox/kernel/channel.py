"""One channel to a kernel: a ZeroMQ connection over a Unix socket that is already there, driven by the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Literal

from sandbox.kernel.zmtp import SUBSCRIBE, Decoder, ProtocolError, encode, opening

_READ_BYTES = 32 * 1024
"""A turn's share: a kernel that floods gets the loop for a few milliseconds, then the others have theirs."""
_LAST_READS = 64


class Channel:
    """Belongs to one event loop; owns its descriptor.

    Args:
        descriptor: a connected, non-blocking Unix socket.
        kind: our end of the pattern.
        take: gets each message's frames; may raise ProtocolError.
        broken: gets the reason when the peer sent what no honest kernel sends; nothing is read after that.
    """

    def __init__(
        self, descriptor: int, kind: Literal["DEALER", "SUB"], take: Callable[[list[bytes]], None],
        broken: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._descriptor, self._take, self._broken = descriptor, take, broken
        self._decoder = Decoder()
        self._waiting = bytearray(encode(SUBSCRIBE) if kind == "SUB" else b"")  # for the peer to be ready
        self._unsent = bytearray()
        self._open = True
        asyncio.get_running_loop().add_reader(descriptor, self._on_readable)
        self._write(opening(kind))

    def send(self, frames: Sequence[bytes]) -> None:
        """Send one message, now or when the kernel reads."""
        if self._decoder.ready:
            self._write(encode(frames))
        else:
            self._waiting += encode(frames)

    def drain(self) -> None:
        """Take what the socket still holds of a kernel that has ended."""
        for _ in range(_LAST_READS):
            if not self._on_readable():
                return

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        if self._open:
            self._open = False
            self._stop()
            os.close(self._descriptor)

    def _write(self, data: bytes | bytearray) -> None:
        if self._open:
            self._unsent += data
            self._on_writable()

    def _on_writable(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                del self._unsent[: os.write(self._descriptor, self._unsent[: 16 * _READ_BYTES])]
        except BlockingIOError:
            loop.add_writer(self._descriptor, self._on_writable)
            return
        except OSError:  # it has closed its end: its exit says the rest
            self._unsent.clear()
        loop.remove_writer(self._descriptor)

    def _on_readable(self) -> bool:
        """One turn's reading; False where there was nothing, and nothing will come."""
        if not self._open:
            return False
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            return False
        try:
            for frames in self._decoder.feed(data):
                self._take(frames)
            if self._waiting and self._decoder.ready:
                waiting, self._waiting = self._waiting, bytearray()
                self._write(waiting)
        except ProtocolError as error:
            self._stop()
            self._broken(str(error))
            return False
        return True

    def _stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        asyncio.get_running_loop().remove_writer(self._descriptor)
