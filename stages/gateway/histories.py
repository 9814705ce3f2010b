"""Reads of a request only what its history has new: clients send all of it each time, mostly byte for byte. Pure.

Where a body begins with the very bytes of an earlier one, up to the end of that one's last message, the messages up to
there are the earlier one's and are not read again: what is left, set behind the bytes before the list, is a whole
request with the new messages alone. The same objects stand in all histories then, so what a session holds grows by what
is said and not by what is sent.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stages.gateway.asks import Ask, Dialect
from stages.gateway.errors import RefusedError


class Heard(msgspec.Struct, frozen=True):
    """A request that was read.

    Args:
        body: as it came.
        ask: what it asks.
        begin: bytes of the body up to the list of messages, the bracket included; 0 where nothing can go on from it.
        end: bytes up to the end of the last message.
    """

    body: bytes
    ask: Ask
    begin: int = 0
    end: int = 0


def heard(dialect: Dialect, body: bytes, earlier: Iterable[Heard] = ()) -> Heard:
    """Read a request.

    Args:
        dialect: of all of them.
        body: as it came.
        earlier: requests that it may go on from, the likeliest first.

    Raises:
        RefusedError: it is wrong.
    """
    for one in earlier:
        goes_on = one.end and body[one.end : one.end + 1] == b"," and body.startswith(one.body[: one.end])
        if goes_on and (found := _further(dialect, body, one)) is not None:
            return found
    ask = dialect.read(body)
    array = _array(body, dialect.history) if _settled(ask) else b""
    if not array or body.count(array) != 1:  # where the list stands must be no guess
        return Heard(body, ask)
    start = body.index(array)
    return Heard(body, ask, start + 1, start + _length(array))


def _further(dialect: Dialect, body: bytes, before: Heard) -> Heard | None:
    """The request as one that goes on from another, or None where it is wrong, or its list ends before it begins."""
    small = before.body[: before.begin] + body[before.end + 1 :]
    try:
        new = dialect.read(small)
    except RefusedError:  # read as a whole, it says where
        return None
    array, start = _array(small, dialect.history), before.begin - 1
    own, old = new.instructions, before.ask
    if not array or not small.startswith(array, start) or small.count(array) != 1:
        return None
    messages = (*new.messages[:own], *old.messages[old.instructions :], *new.messages[own:])
    ask = msgspec.structs.replace(new, messages=messages)
    if not _settled(ask):
        return Heard(body, ask)
    return Heard(body, ask, before.begin, before.end + _length(array))


def _settled(ask: Ask) -> bool:
    """Whether further messages leave these as they are: an assistant's turn of several items may still go on."""
    return len(ask.messages) > ask.instructions and ask.messages[-1].role != "assistant"


def _array(body: bytes, field: str | None) -> bytes:
    """The bytes of one field's list; nothing where there is none, or an empty one."""
    if field is None:
        return b""
    array = bytes(msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get(field, b""))
    return array if array.startswith(b"[") and _length(array) > 1 else b""


def _length(array: bytes) -> int:
    """Bytes of a list up to the end of its last element."""
    return len(array[:-1].rstrip(b" \t\r\n"))
