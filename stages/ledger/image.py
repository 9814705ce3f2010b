"""The ledger as one value: everything that its future depends on, so that a copy goes on exactly like the original.

State alone does not say where queued work stands: an environment keeps the priority that it was queued with, and work
that backs off may have been queued again by somebody else. So the queues' living entries are part of the value.
"""

from __future__ import annotations

import hashlib

import msgspec

from stages.ledger.machine import Ledger
from stages.ledger.state import STAGES, State

Places = dict[str, tuple[int, int]]


class Image(msgspec.Struct, frozen=True):
    """A ledger between two events; `queues` holds each stage's entries, `held` those behind the ready buffer."""

    state: State
    queues: dict[str, Places]
    held: Places


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Image, dec_hook=lambda kind, value: kind(value))

SCHEMA = hashlib.blake2b(repr(msgspec.inspect.type_info(Image)).encode(), digest_size=8).hexdigest()
"""Names the records' shape: bytes of another shape are not taken for an image, even where they would decode."""


def encode(ledger: Ledger) -> bytes:
    """The ledger now, as msgpack: about a microsecond for each open rollout."""
    queues = {stage: ledger.queues.by_stage[stage].entries() for stage in STAGES}
    return _encoder.encode(Image(ledger.state, queues, ledger.queues.held.entries()))


def decode(data: bytes | memoryview) -> Ledger:
    """The ledger of an image.

    Raises:
        msgspec.MsgspecError: not an image of this version.
    """
    return restored(_decoder.decode(data))


def restored(image: Image) -> Ledger:
    """A ledger that goes on from the image; it owns the image's state from here on."""
    ledger = Ledger()
    ledger.state = image.state
    for stage in STAGES:
        ledger.queues.by_stage[stage].refill(image.queues[stage])
    ledger.queues.held.refill(image.held)
    return ledger
