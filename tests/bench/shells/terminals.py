"""Terminals of the field beside ours, where they are installed: seconds of each `true` that they run."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable

Run = Callable[[], Awaitable[None]]


@contextlib.asynccontextmanager
async def tmux() -> AsyncIterator[Run]:
    """tmux with its own signal for the end of a command: quicker than looking at its screen every half second."""
    server = f"rollmill-bench-{secrets.token_hex(4)}"

    async def ask(*words: str) -> None:
        process = await asyncio.create_subprocess_exec("tmux", "-L", server, *words)
        if await process.wait():
            raise AssertionError(f"tmux {words[0]} failed")

    async def run() -> None:
        await ask("send-keys", f"true; tmux -L {server} wait-for -S done", "Enter")
        await ask("wait-for", "done")

    await ask("-f", "/dev/null", "new-session", "-d", "bash --norc --noprofile")
    try:
        yield run
    finally:
        await ask("kill-server")


@contextlib.asynccontextmanager
async def swe_rex() -> AsyncIterator[Run]:
    """SWE-ReX's shell session in this process, without its HTTP server."""
    local, abstract = (importlib.import_module(f"swerex.runtime.{name}") for name in ("local", "abstract"))
    runtime = local.LocalRuntime()
    await runtime.create_session(abstract.CreateBashSessionRequest(startup_timeout=20.0))

    async def run() -> None:
        if (await runtime.run_in_session(abstract.BashAction(command="true"))).exit_code != 0:
            raise AssertionError("SWE-ReX says that true failed")

    try:
        yield run
    finally:
        await runtime.close()


def installed() -> dict[str, Callable[[], contextlib.AbstractAsyncContextManager[Run]]]:
    """The peers that are here, by name."""
    found: dict[str, Callable[[], contextlib.AbstractAsyncContextManager[Run]]] = {}
    if shutil.which("tmux"):
        found["tmux"] = tmux
    with contextlib.suppress(ImportError):
        importlib.import_module("swerex.runtime.local")
        found["swe_rex"] = swe_rex
    return found


async def times(peer: Callable[[], contextlib.AbstractAsyncContextManager[Run]], rounds: int) -> list[float]:
    """Seconds of each round trip, after a few that do not count."""
    spent = []
    async with peer() as run:
        for number in range(rounds + 3):
            started = time.perf_counter()
            await run()
            if number >= 3:
                spent.append(time.perf_counter() - started)
    return spent
