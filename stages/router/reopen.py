"""Reopening a run: from its newest snapshot that history and index bear out, through every event after it."""

from __future__ import annotations

import logging
import time

import msgspec

from stages.errors import JournalError
from stages.journal import snapshots
from stages.journal.history import Replay
from stages.journal.snapshots import Header, Snapshot
from stages.layout import RunLayout
from stages.ledger import image
from stages.ledger.events import Part
from stages.ledger.machine import Ledger
from stages.router.failures import known_up_to
from stages.router.publisher import Publisher
from stages.router.segments import SegmentSweeper

log = logging.getLogger(__name__)


class Reopened(msgspec.Struct):
    """What replay found: the ledger, the bytes that it believed, and how many events it had to read for that."""

    ledger: Ledger
    history: list[Part]
    replayed: int


def reopen(layout: RunLayout, publisher: Publisher, segments: SegmentSweeper) -> Reopened:
    """Bring everything to where the journal ends. Blocking; after the claim, before anything is written.

    Raises:
        JournalError: the history is damaged, or ends before what was published of it.
        ShardError: the index is damaged.
    """
    started = time.monotonic()
    publisher.load()
    replay = Replay(layout)
    ledger, after = _begin(layout, replay, publisher, segments)
    replayed = 0
    for event in replay.events(after):
        _, effects = ledger.apply(event)
        publisher.take(effects)
        segments.take(effects)
        replayed += 1
    if publisher.published > ledger.state.seq:
        raise JournalError(
            f"{layout.index} shows seq {publisher.published}, {layout.journal} ends at {ledger.state.seq}: what was "
            "acknowledged cannot be read; wait for the filesystem, restore the journal, or start a new run directory"
        )
    log.info("%d events replayed in %.1f s", replayed, time.monotonic() - started)
    return Reopened(ledger, replay.history, replayed)


def _begin(
    layout: RunLayout, replay: Replay, publisher: Publisher, segments: SegmentSweeper
) -> tuple[Ledger, list[Part]]:
    for snapshot in snapshots.newest_first(layout):
        header = snapshot.header
        failures = known_up_to(layout, header.seq)
        ledger = _usable(snapshot, replay, publisher.published, len(failures))
        if ledger is not None:
            publisher.keep_failures(failures)
            segments.restore(header.finished)
            log.info("%s stands for everything up to seq %d", snapshot.name, header.seq)
            return ledger, header.parts
    return Ledger(), []


def _usable(snapshot: Snapshot, replay: Replay, published: int, failures: int) -> Ledger | None:
    """The snapshot's ledger, unless replay alone can tell what the files beside the journal have lost since."""
    problem = _problem(snapshot.header, replay, published, failures)
    if problem is None:
        try:
            return image.decode(snapshot.body)
        except msgspec.MsgspecError as error:
            problem = f"it cannot be decoded: {error}"
    log.warning("%s is passed over: %s", snapshot.name, problem)
    return None


def _problem(header: Header, replay: Replay, published: int, failures: int) -> str | None:
    if not replay.covers(header.parts, header.last_line):
        return "the journal does not begin with what it stands for"
    if published < header.seq:
        return f"the index ends at seq {published}, it needs {header.seq}"
    if failures != header.failed:
        return f"failures.jsonl has {failures} lines up to seq {header.seq}, it needs {header.failed}"
    return None
