"""Waiting for something to become true, with a deadline and a clear message."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def eventually(check: Callable[[], T | Awaitable[T]], what: str, timeout_s: float = 60.0) -> T:
    """The first truthy value of `check`; AssertionError when none came in time."""
    until = time.monotonic() + timeout_s
    while True:
        value = check()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value  # type: ignore[return-value]
        assert time.monotonic() < until, f"{what}: not within {timeout_s:g} s"
        await asyncio.sleep(0.02)


def poll(check: Callable[[], T], what: str, timeout_s: float = 60.0, every_s: float = 0.02) -> T:
    """The first truthy value of `check`, without an event loop; AssertionError when none came in time."""
    until = time.monotonic() + timeout_s
    pause = threading.Event()
    while not (value := check()):
        assert time.monotonic() < until, f"{what}: not within {timeout_s:g} s"
        pause.wait(every_s)
    return value
