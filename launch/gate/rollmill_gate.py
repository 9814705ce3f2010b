"""Guards every route of a vLLM server by its api key. Loaded into vLLM's own interpreter, so it needs Python alone.

vLLM's key guards /v1, /v2, /inference and /cohere; the routes that pause it and change its weights would be open to
everybody who reaches its port, every user of the node among them. vLLM is given this class by `--middleware`, with this
directory alone on its PYTHONPATH.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

OPEN_PATHS = frozenset({"/health", "/ping"})
"""Answered without the key: there is nothing to tell or do."""

App = Callable[[dict[str, Any], Any, Callable[[dict[str, Any]], Awaitable[None]]], Awaitable[None]]


class Gate:
    """ASGI middleware; the key is the environment's VLLM_API_KEY, without which nothing passes."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()
        if self._expected == b"Bearer ":
            raise ValueError("VLLM_API_KEY is empty")

    async def __call__(
        self, scope: dict[str, Any], receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        """Answer 401 in place of the server where the key is missing or wrong; other than HTTP nothing is served."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._allows(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error":"Unauthorized"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _allows(self, scope: dict[str, Any]) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return scope["path"] in OPEN_PATHS or (len(given) == 1 and hmac.compare_digest(given[0], self._expected))
