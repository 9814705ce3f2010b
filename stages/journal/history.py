"""Claiming an epoch and replaying everything before it (design: epochs and fences).

A router claims epoch N+1 by hard-linking a private file to the epoch's claim name; the link count proves the win.
Only then does it read what epoch N left: an acknowledgement of N was given after N looked for this very claim past its
fsync, so whatever was acknowledged is there to be read. Its first record seals every earlier part at the length read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from stages import sharedfs
from stages.errors import FencedError, JournalError
from stages.journal.codec import check_size, scan, scan_sealed
from stages.layout import RunLayout, parse_part
from stages.ledger import events
from stages.ledger.events import AnyEvent, EpochBegan, Part, PartBegan

_OPEN: Final = -1
"""Length of a part that nothing has sealed yet: it goes as far as its lines can be believed."""
_FIRST_BYTES: Final = 1 << 18


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
    """Reads the history of a run directory in order; afterwards `history` names exactly the bytes that it believed.

    Parts are found once, when it is made: after the claim, so that what they hold can only be added to by a zombie.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._known = self._parts()
        self.history: list[Part] = []

    def covers(self, parts: Sequence[Part], last_line: int) -> bool:
        """Whether history begins with exactly these parts, the last one up to a line of `last_line` bytes."""
        theirs = [part for part in parts if part.length]
        ours = [part for part in self._known if part.length != 0]
        if not theirs or len(theirs) > len(ours):
            return False
        for mine, covered in zip(ours, theirs[:-1], strict=False):
            if (mine.epoch, mine.part) != (covered.epoch, covered.part) or mine.length not in {covered.length, _OPEN}:
                return False
        mine, last = ours[len(theirs) - 1], theirs[-1]
        if (mine.epoch, mine.part) != (last.epoch, last.part):
            return False
        if mine.length != _OPEN and mine.length < last.length:
            return False
        start = last.length - last_line
        line = sharedfs.read_range(self._layout.journal_part(last.epoch, last.part), start, last_line)
        return line[:8] == last.crc.encode() and next((s.end for s in scan(line)), -1) == last_line

    def events(self, after: Sequence[Part] = ()) -> Iterator[AnyEvent]:
        """Every event in order, without those that lie in `after`, which history must cover.

        Raises:
            JournalError: a sealed part is damaged, or a line is no event of this version.
        """
        self.history = []
        skipped = {(part.epoch, part.part): part for part in after}
        for part in self._known:
            covered = skipped.get((part.epoch, part.part), Part(part.epoch, part.part, 0, ""))
            if part.length == _OPEN:
                yield from self._unsealed(covered)
            else:
                yield from self._sealed(part, covered.length)

    def _parts(self) -> list[Part]:
        """All parts in order; the length of one that nothing has sealed is `_OPEN`."""
        tail = self._newest_tail()
        if tail is None:
            return []
        own = [self._sealed_by_successor(tail, position) for position in range(len(tail.parts))]
        return [*tail.sealed, *own]

    def _newest_tail(self) -> Tail | None:
        names = (parse_part(name) for name in sharedfs.list_dir(self._layout.journal))
        parts_of: dict[int, list[int]] = {}
        for parsed in names:
            if parsed is not None:
                parts_of.setdefault(parsed[0], []).append(parsed[1])
        for epoch in sorted(parts_of, reverse=True):
            began = self._epoch_began(epoch, sorted(parts_of[epoch]))
            # An epoch that was claimed and never wrote its first record has decided nothing.
            if began is not None:
                return Tail(began.history, epoch, sorted(parts_of[epoch]))
        return None

    def _epoch_began(self, epoch: int, parts: list[int]) -> EpochBegan | None:
        """The epoch's first record; where part 0 broke, it stands in a later part behind that part's own first."""
        for number in parts:
            for event in self._first_events(epoch, number, 2):
                if isinstance(event, EpochBegan):
                    return event
        return None

    def _sealed_by_successor(self, tail: Tail, position: int) -> Part:
        """A part of the same epoch is sealed by the next one's first record, where that was written."""
        number = tail.parts[position]
        for later in tail.parts[position + 1 :]:
            first = self._first_event(tail.epoch, later)
            if isinstance(first, PartBegan):
                # A part that its successor does not name broke before it held anything good.
                return next((part for part in first.before if part.part == number), Part(tail.epoch, number, 0, ""))
        return Part(tail.epoch, number, _OPEN, "")

    def _first_event(self, epoch: int, part: int) -> AnyEvent | None:
        return next(iter(self._first_events(epoch, part, 1)), None)

    def _first_events(self, epoch: int, part: int, count: int) -> list[AnyEvent]:
        size = _FIRST_BYTES
        while True:
            try:
                data = sharedfs.read_range(self._layout.journal_part(epoch, part), 0, size)
            except FileNotFoundError:
                return []
            lines = list(itertools.islice(scan(data), count))
            if len(lines) == count or len(data) < size or data.count(b"\n") > len(lines):
                return [self._decode(line.body, epoch, part) for line in lines]
            size *= 4

    def _sealed(self, part: Part, start: int) -> Iterator[AnyEvent]:
        path = self._layout.journal_part(part.epoch, part.part)
        name = f"{part.epoch}-{part.part}"
        if start < part.length:
            data = sharedfs.read_range(path, start, part.length - start)
            for line in scan_sealed(data, part.length, name, start):
                yield self._decode(line.body, part.epoch, part.part)
        elif part.length:
            check_size(path, part.length, name)
        self.history.append(part)

    def _unsealed(self, covered: Part) -> Iterator[AnyEvent]:
        epoch, number, start, crc = covered.epoch, covered.part, covered.length, covered.crc
        path, length = self._layout.journal_part(epoch, number), start
        for line in scan(sharedfs.read_range(path, start, max(0, sharedfs.stat_size(path) - start))):
            yield self._decode(line.body, epoch, number)
            length, crc = start + line.end, line.crc
        self.history.append(Part(epoch, number, length, crc))

    def _decode(self, body: memoryview, epoch: int, part: int) -> AnyEvent:
        try:
            return events.decode(body)
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise JournalError(f"journal part {epoch}-{part}: not an event of this version: {error}") from error


def read_events(layout: RunLayout) -> Iterator[AnyEvent]:
    """The run's events as they stand on disk now; for status, `rollmill journal` and tests."""
    return Replay(layout).events()
