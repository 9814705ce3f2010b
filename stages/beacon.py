"""router.json: the one file that tells where the router is, and whether it still lives (its beat moves)."""

from __future__ import annotations

import asyncio
import errno
import time
from typing import Final

import msgspec

from stages import sharedfs
from stages.errors import StageError
from stages.identity import Identity, is_surely_dead
from stages.layout import RunLayout

LOOKS: Final = 8
LOOK_AGAIN_S: Final = 0.05


class Beacon(msgspec.Struct, frozen=True):
    """What router.json holds; `beat` rises while the router lives, `ended` says that it left in order."""

    epoch: int
    url: str
    node: str
    pid: int
    beat: int = 0
    ended: bool = False
    slurm: str | None = None
    boot: str = ""
    pid_namespace: str = ""

    @property
    def identity(self) -> Identity:
        """Who wrote it."""
        return Identity(self.node, self.pid, self.boot, self.pid_namespace)


def read(layout: RunLayout) -> Beacon | None:
    """The beacon as visible now, or None where there is none yet.

    A network filesystem may show a replaced file as stale or cut for a moment, so that is looked at again. Blocking.

    Raises:
        StageError: it stays unreadable.
    """
    for _ in range(LOOKS):
        try:
            return msgspec.json.decode(sharedfs.read_bytes(layout.router_json), type=Beacon)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as failure:
            if isinstance(failure, OSError) and failure.errno != errno.ESTALE:
                raise
            error = failure
        time.sleep(LOOK_AGAIN_S)
    raise StageError(f"{layout.router_json} is not a router's beacon: {error}") from error


def write(layout: RunLayout, beacon: Beacon) -> None:
    """Replace the beacon."""
    sharedfs.write_atomic(layout.router_json, msgspec.json.encode(beacon))


async def wait_until_free(layout: RunLayout, ttl_s: float, poll_s: float = 0.5) -> None:
    """Return when no router of this run can be alive: it left, is provably dead, or its beat stood still for a ttl.

    Raises:
        StageError: its beat moves.
    """
    first = await asyncio.to_thread(read, layout)
    if first is None or first.ended or is_surely_dead(first.identity):
        return
    stood_still_since = time.monotonic()
    while time.monotonic() - stood_still_since < ttl_s:
        await asyncio.sleep(poll_s)
        now = await asyncio.to_thread(read, layout)
        if now is not None and (now.epoch, now.beat) != (first.epoch, first.beat) and not now.ended:
            raise StageError(
                f"a router of {layout.root} is alive: epoch {now.epoch} at {now.url} on {now.node}; "
                "use it, or stop it with `rollmill cancel`"
            )
        if now is None or now.ended or is_surely_dead(now.identity):
            return
