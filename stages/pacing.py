"""Who reads a large file of the store now: a bounded number of nodes at once, the others wait their turn a while."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stages import sharedfs, storefs

_SHORTEST_S, _LONGEST_S = 0.05, 0.5


@contextmanager
def turn(
    directory: Path,
    slots: int,
    patience_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[bool]:
    """One of `slots` turns at the store, held while the block runs; False where it goes on without one.

    When 64 nodes start at once, all of them unpack the same image. With a turn each, a few read it at the speed of the
    disk, instead of all at a fraction of it, and the first are at work while the last still wait. A turn is a
    locked file, so that a dead node's turn is free at once; nobody waits for longer than his patience, and where
    the filesystem knows no locks nobody waits at all. Blocks.

    Args:
        directory: of the lock files, on the shared filesystem; made where missing.
        slots: how many at once.
        patience_s: seconds after which the block runs all the same.
        clock: monotonic seconds.
        sleep: waits so many seconds.
    """
    held: int | None = None
    try:
        sharedfs.make_dirs(directory)
        end = clock() + patience_s
        numbers = list(range(slots))
        random.shuffle(numbers)
        while held is None and clock() < end:
            for number in numbers:
                held = storefs.try_lock(directory / f"{number}.lock")
                if held is not None:
                    break
            else:
                sleep(random.uniform(_SHORTEST_S, _LONGEST_S))  # noqa: S311
    except OSError:  # a store that is read-only to us: courtesy is all that is lost
        held = None
    try:
        yield held is not None
    finally:
        if held is not None:
            os.close(held)
