"""The one door to starlette, uvicorn and uvloop: what our servers use of them, and how a server is run and ended.

Starlette and uvicorn are imported where something of them is first asked for: workers use the event loop alone, and
the others' imports cost ten times as much as that.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import uvloop

from stages.errors import StageError

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send

Given = TypeVar("Given")

__all__ = [
    "ASGIApp",
    "ClientDisconnect",
    "HTTPException",
    "Receive",
    "Request",
    "Response",
    "Route",
    "Scope",
    "Send",
    "Starlette",
    "StreamingResponse",
    "run",
    "serve_app",
]

_STARLETTE: Final = {
    "Starlette": "applications", "HTTPException": "exceptions", "ClientDisconnect": "requests", "Request": "requests",
    "Response": "responses", "StreamingResponse": "responses", "Route": "routing", "ASGIApp": "types",
    "Receive": "types", "Scope": "types", "Send": "types",
}  # fmt: skip
"""Where starlette has each name."""

KEEP_ALIVE_S = 30
"""Idle connections stay open this long; clients must give theirs up sooner, or they write into a closing one."""


def __getattr__(name: str) -> Any:
    if name not in _STARLETTE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"starlette.{_STARLETTE[name]}"), name)


def _server(config: uvicorn.Config) -> tuple[uvicorn.Server, asyncio.Event]:
    """A uvicorn server that leaves signals to the process, and what is set once it listens."""
    import uvicorn

    listening = asyncio.Event()

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Install nothing: a signal is the process body's to interpret."""
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Start as uvicorn does, then tell."""
            await super().startup(sockets)
            listening.set()

    return Server(config), listening


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise StageError(
            f"cannot listen on {host}:{port} ({error.strerror}); give an address of this machine and a free port"
        ) from error
    return sock


async def serve_app(
    app: ASGIApp,
    host: str,
    port: int,
    on_ready: Callable[[str], Awaitable[None]],
    *,
    access_log: bool = False,
    grace_s: int = 3,
) -> None:
    """Serve until cancelled.

    Args:
        app: the ASGI application.
        host: address to listen on.
        port: port to listen on; 0 takes any free one.
        on_ready: awaited with the url once connections are accepted.
        access_log: one log line a request.
        grace_s: at the end, seconds that requests in flight may still take before they are cancelled.

    Raises:
        StageError: the address cannot be listened on.
    """
    import uvicorn

    with _bind(host, port) as sock:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=access_log,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
            backlog=4096,
            server_header=False,
            proxy_headers=False,  # no proxy stands before us, and who says that he is one is not believed
        )
        server, started = _server(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]), name="uvicorn")
        try:
            listening = asyncio.create_task(started.wait())
            await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
            listening.cancel()
            if not serving.done():
                shown = f"[{host}]" if ":" in host else host
                await on_ready(f"http://{shown}:{sock.getsockname()[1]}")
            await asyncio.shield(serving)
        finally:
            server.should_exit = True
            # Not cancelled with us: uvicorn closes its connections in order, and ends by itself after grace_s.
            await asyncio.wait({serving}, timeout=grace_s + 2)
            serving.cancel()


def run(main: Coroutine[Any, Any, Given]) -> Given:
    """Run the coroutine of a process that serves, or that does a stage's work, on uvloop."""
    # What is loaded by now stays, and records of open work hold no cycles: looking at them again and again for some
    # took a fifth of a router's time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    return uvloop.run(main)
