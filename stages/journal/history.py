"""Claiming an epoch and replaying everything before it (design: epochs and fences).

A router claims epoch N+1 by hard-linking a private file to the epoch's claim name; the link count proves the win.
Only then does it read what epoch N left: an acknowledgement of N was given after N looked for this very claim past its
fsync, so whatever was acknowledged is there to be read. Its first record seals every earlier part at the length read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from stages import sharedfs
from stages.errors import FencedError, JournalError
from stages.journal.codec import scan, scan_sealed
from stages.layout import RunLayout, parse_part
from stages.ledger import events
from stages.ledger.events import AnyEvent, EpochBegan, Part, PartBegan


class Tail(NamedTuple):
    """What the newest epoch left: the sealed parts before it, and its own parts in order."""

    sealed: list[Part]
    epoch: int
    parts: list[int]


def highest_claim(layout: RunLayout) -> int:
    """The newest epoch that any router has claimed; 0 where there is none."""
    claims = [name.removesuffix(".claim") for name in sharedfs.list_dir(layout.journal) if name.endswith(".claim")]
    return max((int(claim) for claim in claims if claim.isdecimal()), default=0)


def claim(layout: RunLayout, epoch: int, owner: str) -> None:
    """Make the epoch ours.

    Raises:
        FencedError: another router was faster.
    """
    private = sharedfs.temp_beside(layout.epoch_claim(epoch))
    sharedfs.create_exclusive(private, owner.encode())
    try:
        won = sharedfs.link(private, layout.epoch_claim(epoch))
    finally:
        sharedfs.unlink(private)
    if not won:
        raise FencedError(f"epoch {epoch} of {layout.root} belongs to another router", epoch=epoch)


def is_fenced(layout: RunLayout, epoch: int) -> bool:
    """Whether a newer epoch has been claimed: whoever holds `epoch` may acknowledge nothing more."""
    return sharedfs.exists(layout.epoch_claim(epoch + 1))


class Replay:
    """Reads the history of a run directory in order; afterwards `history` names exactly the bytes that it believed."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self.history: list[Part] = []

    def events(self) -> Iterator[AnyEvent]:
        """Every event in order.

        Raises:
            JournalError: a sealed part is damaged, or a line is no event of this version.
        """
        tail = self._newest_tail()
        if tail is None:
            return
        for part in tail.sealed:
            yield from self._sealed(part)
        for position, number in enumerate(tail.parts):
            sealed = self._sealed_by_successor(tail, position)
            if sealed is None:
                yield from self._unsealed(tail.epoch, number)
            else:
                yield from self._sealed(sealed)

    def _newest_tail(self) -> Tail | None:
        names = (parse_part(name) for name in sharedfs.list_dir(self._layout.journal))
        parts_of: dict[int, list[int]] = {}
        for parsed in names:
            if parsed is not None:
                parts_of.setdefault(parsed[0], []).append(parsed[1])
        for epoch in sorted(parts_of, reverse=True):
            first = self._first_event(epoch, 0)
            # An epoch that was claimed and never wrote its first record has decided nothing.
            if isinstance(first, EpochBegan):
                return Tail(first.history, epoch, sorted(parts_of[epoch]))
        return None

    def _sealed_by_successor(self, tail: Tail, position: int) -> Part | None:
        """A part of the same epoch is sealed by the next one's first record, where that was written."""
        for later in tail.parts[position + 1 :]:
            first = self._first_event(tail.epoch, later)
            if isinstance(first, PartBegan):
                number = tail.parts[position]
                # A part that its successor does not name broke before it held anything good.
                return next((part for part in first.before if part.part == number), Part(tail.epoch, number, 0, ""))
        return None

    def _first_event(self, epoch: int, part: int) -> AnyEvent | None:
        try:
            data = sharedfs.read_bytes(self._layout.journal_part(epoch, part))
        except FileNotFoundError:
            return None
        line = next(scan(data), None)
        return None if line is None else self._decode(line.body, epoch, part)

    def _sealed(self, part: Part) -> Iterator[AnyEvent]:
        data = sharedfs.read_range(self._layout.journal_part(part.epoch, part.part), 0, part.length)
        for line in scan_sealed(data, part.length, f"{part.epoch}-{part.part}"):
            yield self._decode(line.body, part.epoch, part.part)
        self.history.append(part)

    def _unsealed(self, epoch: int, number: int) -> Iterator[AnyEvent]:
        length, crc = 0, ""
        for line in scan(sharedfs.read_bytes(self._layout.journal_part(epoch, number))):
            yield self._decode(line.body, epoch, number)
            length, crc = line.end, line.crc
        self.history.append(Part(epoch, number, length, crc))

    def _decode(self, body: memoryview, epoch: int, part: int) -> AnyEvent:
        try:
            return events.decode(body)
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise JournalError(f"journal part {epoch}-{part}: not an event of this version: {error}") from error


def read_events(layout: RunLayout) -> Iterator[AnyEvent]:
    """The run's events as they stand on disk now; for status, `rollmill journal` and tests."""
    return Replay(layout).events()
