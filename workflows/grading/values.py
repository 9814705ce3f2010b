"""Plain Python values as JSON that only plain values can come out of: no pickle, no class of the sender's own.

Sent into sandboxes as text, so it imports the standard library alone and runs on Python 3.8.
"""

from __future__ import annotations

import json
import os
import select
import struct
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

LARGEST_BYTES = 16 * 1024 * 1024
"""Of one message."""
DEEPEST = 200
MOST_ITEMS = 100_000
"""Of a range or an iterator: one that goes on further is opaque."""
_SMALL = 1 << 63
"""Integers below go as JSON has them, larger ones as hexadecimal digits: of decimal ones Python reads so many only."""
Left = Callable[[], float]
"""Seconds to wait now; 0 ends the waiting."""
_COLLECTIONS: dict[str, Any] = {"l": list, "t": tuple, "z": frozenset, "s": set}
_LENGTH = struct.Struct(">I")


class NotPlainError(Exception):
    """A value that cannot be sent, or bytes that are no message."""


class Opaque:
    """Stands for a value that is not plain; equal to nothing, not even to itself."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("a value of class " + self.kind + " is neither true nor false here")


def encode(value: Any, depth: int = 0) -> Any:
    """The value as JSON data; an instance of a subclass becomes its plain base, anything else opaque.

    An iterator is used up: it arrives as one over the same values.

    Raises:
        NotPlainError: it is nested too deeply, or into itself.
    """
    if depth > DEEPEST:
        raise NotPlainError("nested deeper than " + str(DEEPEST))
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if -_SMALL < number < _SMALL else {"i": hex(number)}
    if isinstance(value, float):
        return {"f": float.hex(value)}
    if isinstance(value, complex):
        return {"c": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    deeper = depth + 1
    if isinstance(value, dict):
        pairs = [[encode(key, deeper), encode(one, deeper)] for key, one in dict.items(value)]
        return {"d": pairs}
    for tag, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return {tag: [encode(one, deeper) for one in kind.__iter__(value)]}
    if isinstance(value, range) and len(value[: MOST_ITEMS + 1]) <= MOST_ITEMS:
        return {"r": [encode(one) for one in (value.start, value.stop, value.step)]}
    if isinstance(value, Iterator):
        items = list(islice(value, MOST_ITEMS + 1))
        if len(items) <= MOST_ITEMS:
            return {"n": [encode(one, deeper) for one in items]}
    return {"x": type(value).__name__}


def carried(value: Any) -> Any:
    """What arrives of JSON data that is sent: the same data, or an error as of `Pipe.send`."""
    return json.loads(_body(value))


def _body(message: Any) -> bytes:
    body = json.dumps(message).encode()
    if len(body) > LARGEST_BYTES:
        raise NotPlainError("a message of " + str(len(body)) + " bytes; the most is " + str(LARGEST_BYTES))
    return body


def _range(data: Any) -> range:
    made = range(*[decode(one) for one in data])
    if len(made[: MOST_ITEMS + 1]) > MOST_ITEMS:
        raise ValueError("a range of more than " + str(MOST_ITEMS))
    return made


_READERS: dict[str, Callable[[Any], Any]] = {
    "i": lambda data: int(data, 16),
    "f": float.fromhex,
    "c": lambda data: complex(float.fromhex(data[0]), float.fromhex(data[1])),
    "b": bytes.fromhex,
    "d": lambda data: {decode(key): decode(one) for key, one in data},
    "l": lambda data: [decode(one) for one in data],
    "t": lambda data: tuple([decode(one) for one in data]),
    "s": lambda data: {decode(one) for one in data},
    "z": lambda data: frozenset([decode(one) for one in data]),
    "r": _range,
    "n": lambda data: iter([decode(one) for one in data]),
    "x": lambda data: Opaque(str(data)[:200]),
}


def decode(data: Any) -> Any:
    """The value of what `encode` gave, of exact built-in types.

    Raises:
        NotPlainError: nothing that `encode` gives looks like this.
    """
    if data is None or isinstance(data, (bool, int, str)):
        return data
    if isinstance(data, dict) and len(data) == 1:
        ((tag, content),) = data.items()
        if tag in _READERS:
            try:
                return _READERS[tag](content)
            except NotPlainError:
                raise
            except (TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
                raise NotPlainError(str(error)[:200]) from None
    raise NotPlainError("no plain value")


class Pipe:
    """Messages over a pair of pipes, each with its length before it.

    Args:
        read: descriptor to read from.
        write: descriptor to write to.
    """

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write

    def send(self, message: Any, left: Left | None = None) -> None:
        """Write one message.

        Raises:
            NotPlainError: it is too large.
            EOFError: the other side is gone, or did not read while time was left.
        """
        body = _body(message)
        unsent = memoryview(_LENGTH.pack(len(body)) + body)
        while unsent:
            self._wait(self._write, left, write=True)
            try:
                unsent = unsent[os.write(self._write, unsent[:65536] if left is None else unsent[:4096]) :]
            except OSError as error:
                raise EOFError("the other side is gone") from error

    def receive(self, left: Left | None = None) -> Any:
        """Read one message; None at the end.

        Raises:
            NotPlainError: it is no message.
            EOFError: the other side left in the middle, or nothing came while time was left.
        """
        head = self._take(_LENGTH.size, left)
        if not head:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > LARGEST_BYTES:
            raise NotPlainError("a message of " + str(length) + " bytes")
        try:
            return json.loads(self._take(length, left))
        except (ValueError, RecursionError) as error:
            raise NotPlainError(str(error)[:200]) from None

    def _take(self, size: int, left: Left | None) -> bytes:
        parts: list[bytes] = []
        missing = size
        while missing:
            self._wait(self._read, left)
            data = os.read(self._read, min(missing, 65536))
            if not data:
                if missing < size:
                    raise EOFError("the other side left in the middle of a message")
                return b""
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def _wait(self, descriptor: int, left: Left | None, write: bool = False) -> None:
        if left is None:
            return
        while True:
            seconds = left()
            ready = select.select([] if write else [descriptor], [descriptor] if write else [], [], seconds)
            if ready[0] or ready[1]:
                return
            if not seconds:
                raise EOFError("nothing came in time")
