"""The engine's development routes: pausing, new weights, their version, the prefix cache, aborts. Never without a key.

vLLM offers them in its development mode, where its own api key does not guard them; here the key guards all of them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec

from stages.engine.bodies import AbortRequest, CollectiveRequest, WeightVersionRequest, bad_literal, decode_body
from stages.engine.errors import EngineError, RequestError
from stages.engine.loop import EngineLoop, PauseMode
from stages.engine.qwen3 import Qwen3
from stages.engine.requests import Requests
from stages.web import Request, Response, Route

_MODES = ("abort", "wait", "keep")


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _flag(request: Request, name: str) -> bool:
    return request.query_params.get(name, "false").lower() in ("1", "true", "on", "yes")


class Admin:
    """Handlers over one loop."""

    def __init__(self, loop: EngineLoop, requests: Requests) -> None:
        self._loop, self._requests = loop, requests

    def routes(self) -> list[Route]:
        """What `create_app` adds where the development routes are on."""
        return [
            Route("/pause", self.pause, methods=["POST"]),
            Route("/resume", self.resume, methods=["POST"]),
            Route("/is_paused", self.is_paused),
            Route("/weight_info", self.weight_info),
            Route("/update_weight_version", self.update_weight_version, methods=["POST"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/collective_rpc", self.collective_rpc, methods=["POST"]),
            Route("/abort_requests", self.abort_requests, methods=["POST"]),
        ]

    async def pause(self, request: Request) -> Response:
        """POST /pause?mode=keep|wait|abort: answered once nothing is drawn any more."""
        mode = request.query_params.get("mode", "abort")
        if mode not in _MODES:
            raise bad_literal("query.mode", mode, _MODES)
        await self._loop.pause(cast(PauseMode, mode))
        return _json({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        """POST /resume."""
        self._loop.resume()
        return _json({"status": "resumed"})

    async def is_paused(self, _: Request) -> Response:
        """GET /is_paused."""
        return _json({"is_paused": self._loop.paused})

    async def weight_info(self, _: Request) -> Response:
        """GET /weight_info."""
        return _json({"weight_version": self._loop.scheduler.weight_version})

    async def update_weight_version(self, request: Request) -> Response:
        """POST /update_weight_version: what answers say of tokens drawn from now on."""
        version = decode_body(await request.body(), WeightVersionRequest).new_version
        self._loop.scheduler.weight_version = version
        return _json({"success": True, "new_version": version})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """POST /reset_prefix_cache[?reset_running_requests=true]."""
        done = self._loop.scheduler.reset_prefix_cache(running=_flag(request, "reset_running_requests"))
        return _json({"success": done})

    async def collective_rpc(self, request: Request) -> Response:
        """POST /collective_rpc: `reload_weights` alone; a directory that does not serve changes nothing."""
        body = decode_body(await request.body(), CollectiveRequest)
        path: Any = body.kwargs.get("weights_path")
        if body.method != "reload_weights" or not isinstance(path, str):
            raise RequestError("the embedded engine takes reload_weights with a weights_path", param="method")
        try:
            model = await asyncio.to_thread(Qwen3.load, Path(path))
            self._loop.replace_model(model)
        except EngineError as error:
            raise RequestError(str(error), param="weights_path") from error
        return _json({"results": [None]})

    async def abort_requests(self, request: Request) -> Response:
        """POST /abort_requests: those named, or all; like vLLM it counts the names, not what was running."""
        names = decode_body(await request.body(), AbortRequest).request_ids
        if not names:
            return _json({"status": "aborted", "aborted": self._loop.abort_all()})
        self._requests.abort(names)
        return _json({"status": "aborted", "aborted": len(names)})

    async def abort_quietly(self, request: Request) -> Response:
        """POST /inference/v1/abort_requests: a route of the engine's users, so it is there without the others."""
        self._requests.abort(decode_body(await request.body(), AbortRequest).request_ids)
        return Response()
