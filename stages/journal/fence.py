"""Fences: how a router knows, past every fsync, that it still is the run's router, and what its filesystem allows.

Where the namespace is coherent a stat of the successor's claim settles it. An NFS client may answer that from its
attribute cache, for up to a minute by default: there a router also fences itself by time. A successor claims only
after the beat stood still for a lease time, so whoever has not managed a beat for half of one acknowledges nothing.
"""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path
from typing import Final, NamedTuple

from stages import sharedfs
from stages.errors import FencedError, JournalError
from stages.journal.history import is_fenced
from stages.layout import RunLayout

STAT, TIME = "stat", "stat and time"
_MOUNTS: Final = Path("/proc/self/mounts")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
"""How the kernel writes blanks and backslashes in that file; all other bytes stand as they are."""
_INCOHERENT: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs"})

log = logging.getLogger(__name__)


class Probed(NamedTuple):
    """What a run directory's filesystem is, and which fence holds there."""

    filesystem: str
    kind: str


class Fence:
    """One epoch's. With `hold_s` a beat must have been written within so many seconds."""

    def __init__(self, layout: RunLayout, epoch: int, hold_s: float | None = None) -> None:
        self._layout, self._epoch, self._hold_s = layout, epoch, hold_s
        self._beaten_at = _boottime()

    def beaten(self, at: float | None = None) -> None:
        """The beat is on the filesystem; its writing began at `at` (see `now`)."""
        self._beaten_at = self.now() if at is None else at

    @staticmethod
    def now() -> float:
        """The fence's clock, in seconds; it goes on while the machine sleeps."""
        return _boottime()

    def check(self) -> None:
        """Look. Blocking.

        Raises:
            FencedError: a newer router has claimed the run, or may have.
            OSError: the filesystem does not say; nothing may be acknowledged until it does.
        """
        if is_fenced(self._layout, self._epoch):
            raise FencedError(f"epoch {self._epoch} is over: a newer router has claimed {self._layout.root}")
        silent_s = self.now() - self._beaten_at
        if self._hold_s is not None and silent_s > self._hold_s:
            raise FencedError(
                f"epoch {self._epoch} ends itself: no beat could be written for {silent_s:.1f} s, and on this "
                "filesystem a newer router could not be seen"
            )


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def probe(layout: RunLayout) -> Probed:
    """The run directory's fence, by its filesystem's type and by trying. Blocking.

    Raises:
        JournalError: the filesystem cannot hold a claim.
    """
    filesystem = filesystem_of(layout.journal.resolve(), os.fsdecode(_MOUNTS.read_bytes()))
    _try_links(layout.journal)
    found = Probed(filesystem, TIME if filesystem in _INCOHERENT else STAT)
    log.info("fence of %s: %s, filesystem %s", layout.journal, found.kind, found.filesystem)
    return found


def filesystem_of(path: Path, mounts: str) -> str:
    """The type of the filesystem that a resolved path lies on, by the text of /proc/self/mounts."""
    best, kind = -1, "unknown"
    for line in mounts.split("\n"):
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_ESCAPED.sub(lambda found: chr(int(found[1], 8)), fields[1]))
        # Of two mounts on one point the later one is what is seen.
        if (path == point or point in path.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind


def _try_links(directory: Path) -> None:
    """Claims need exclusive creation, hard links that are made once, a true link count, and names seen at once."""
    private, rival = sharedfs.temp_beside(directory / "fence"), sharedfs.temp_beside(directory / "fence")
    name = sharedfs.temp_beside(directory / "fence-claim")
    try:
        sharedfs.create_exclusive(private, b"")
        sharedfs.create_exclusive(rival, b"")
        seen_early = sharedfs.exists(name)
        good = sharedfs.link(private, name) and not sharedfs.link(rival, name) and sharedfs.exists(name)
    except OSError as error:
        raise JournalError(f"{directory}: hard links do not work ({error}); routers claim a run by them") from error
    finally:
        for path in (private, rival, name):
            sharedfs.unlink(path)
    if seen_early or not good:
        raise JournalError(f"{directory}: hard links or their counts lie; two routers could claim one epoch")
