"""A place of one lease's own in a worker's scratch, filled by a thread and gone when the lease is done with it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from sandbox.scratch import remove_tree


@contextlib.asynccontextmanager
async def unpacked(scratch: Path, prefix: str, fill: Callable[[Path], object]) -> AsyncIterator[Path]:
    """A new directory in `scratch`, filled; raises what `fill` raises, and leaves nothing then either.

    A thread goes on whoever was cancelled meanwhile, so it is waited for before its directory is removed.
    """
    made: list[Path] = []

    def work() -> Path:
        made.append(Path(tempfile.mkdtemp(prefix=prefix, dir=scratch)))
        fill(made[0])
        return made[0]

    filling = asyncio.create_task(asyncio.to_thread(work), name="unpack")
    try:
        yield await asyncio.shield(filling)
    finally:
        await asyncio.shield(_removed(filling, made))


async def _removed(filling: asyncio.Task[Path], made: list[Path]) -> None:
    await asyncio.wait([filling])
    if not filling.cancelled():
        filling.exception()  # told already, or nobody waits for it any more
    for place in made:
        await asyncio.to_thread(remove_tree, place)
