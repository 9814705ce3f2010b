"""Futures by which somebody waits for one of several things: whichever comes first wakes, the others find it done."""

from __future__ import annotations

import asyncio


def wake(waiter: asyncio.Future[None]) -> None:
    """Let whoever waits go on; nothing where another did, or where it waits no more."""
    if not waiter.done():
        waiter.set_result(None)
