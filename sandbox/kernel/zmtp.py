"""ZeroMQ's wire protocol, the client's side of a Unix socket, with a reader that bounds what it takes. Pure.

libzmq itself bounds a frame (ZMQ_MAXMSGSIZE) and a queue of whole messages (ZMQ_RCVHWM), but not a message: a peer that
sends frame after frame and says of each that more will come grows the reader's memory without end (libzmq 4.3.5: 220 MB
in the first second). A kernel belongs to the agent, so its bytes are read here, where a message has an end.

Method: ZMTP 3.0 (https://rfc.zeromq.org/spec/23/), mechanism NULL.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Literal

MESSAGE_BYTES = 4 * 1024 * 1024
"""Largest message; an honest kernel cuts its own long before."""
FRAMES = 16
"""Most frames in a message: routing, delimiter, signature, four parts, and room."""
SUBSCRIBE = (b"\x01",)
"""The message by which a SUB subscribes to everything."""
COMMANDS = 64
"""Most commands in a connection: one is expected."""

_SIGNATURE = b"\xff\0\0\0\0\0\0\0\x01\x7f"
_GREETING = _SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4


class ProtocolError(Exception):
    """The peer sent what no honest kernel sends."""


def opening(socket_type: Literal["DEALER", "SUB"]) -> bytes:
    """What a client says first: greeting and READY; messages may follow only when the peer is ready too."""
    name, value = b"Socket-Type", socket_type.encode()
    ready = b"\x05READY" + bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    return _GREETING + bytes([_COMMAND, len(ready)]) + ready


def encode(frames: Sequence[bytes]) -> bytes:
    """One message."""
    out = bytearray()
    for number, frame in enumerate(frames):
        flags = _MORE if number < len(frames) - 1 else 0
        if len(frame) > 255:
            out += struct.pack(">BQ", flags | _LONG, len(frame))
        else:
            out += bytes([flags, len(frame)])
        out += frame
    return bytes(out)


class Decoder:
    """Takes a peer's bytes apart into messages; `ready` once the peer takes ours."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeted = self.ready = False
        self._frames: list[bytes] = []
        self._bytes = 0
        self._commands = 0

    def feed(self, data: bytes) -> Iterator[list[bytes]]:
        """The messages that are complete with these bytes.

        Raises:
            ProtocolError: a message is too large, or the bytes are no ZMTP.
        """
        self._buffer += data
        if not self._greeted:
            if len(self._buffer) < len(_GREETING):
                return
            head = bytes(self._buffer[: len(_GREETING)])
            if head[0] != 0xFF or head[9] != 0x7F or head[10] < 3 or head[12:32].rstrip(b"\0") != b"NULL":
                raise ProtocolError("its greeting is not ZeroMQ's")
            del self._buffer[: len(_GREETING)]
            self._greeted = True
        place = 0
        while (frame := self._frame(place)) is not None:
            flags, body, place = frame
            if flags & _COMMAND:
                self._commands += 1
                self.ready |= body.startswith(b"\x05READY")
                if self._commands > COMMANDS:
                    raise ProtocolError(f"it sent more than {COMMANDS} commands")
                continue
            self._frames.append(body)
            self._bytes += len(body)
            if not flags & _MORE:
                message, self._frames, self._bytes = self._frames, [], 0
                yield message
        del self._buffer[:place]

    def _frame(self, place: int) -> tuple[int, bytes, int] | None:
        """Flags, body and end of the frame that begins at `place`, if all of it is there."""
        have = len(self._buffer) - place
        if have < 2:
            return None
        flags, header = self._buffer[place], 2
        size = self._buffer[place + 1]
        if flags > (_MORE | _LONG | _COMMAND):
            raise ProtocolError("its bytes are no ZeroMQ frame")
        if flags & _LONG:
            header = 9
            if have < header:
                return None
            (size,) = struct.unpack_from(">Q", self._buffer, place + 1)
        if size + self._bytes > MESSAGE_BYTES or len(self._frames) >= FRAMES:
            raise ProtocolError(f"it sent a message of more than {MESSAGE_BYTES} bytes or {FRAMES} frames")
        if have < header + size:
            return None
        end = place + header + size
        return flags, bytes(self._buffer[place + header : end]), end
