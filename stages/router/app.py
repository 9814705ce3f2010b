"""The router's HTTP surface: routes, roles, errors and limits."""

# ruff: noqa: D102 - the table in create_app says which route each handler answers

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec

from stages import control
from stages.errors import FencedError, JournalError, ServiceError, ShardError
from stages.ledger.events import Draining
from stages.router.auth import Role, Tokens
from stages.router.core import Router
from stages.router.leasing import Leasing
from stages.router.metrics import render
from stages.router.replicas import Replicas
from stages.router.rollouts import Rollouts, encode_lines
from stages.router.views import status_view
from stages.web import ClientDisconnect, Request, Response, Route, Starlette
from stages.wire import CommitsIn, HeartbeatIn, LeaseIn, PolicyIn, ReplicaIn, RolloutsIn, SessionIn

MAX_BODY: Final = 64 << 20
MAX_WAIT_S: Final = 60.0
TRAINER: Final = frozenset[Role]({"trainer"})
WORKER: Final = frozenset[Role]({"worker"})
BOTH: Final = TRAINER | WORKER
NOT_BUILT: Final = {
    ("GET", "/v1/events"): "server-sent events",
    ("GET", "/"): "the dashboard",
    ("POST", "/run"): "NeMo Gym's agent contract",
    ("GET", "/status"): "ProRL Agent's routes",
    **{("POST", f"/{name}"): "ProRL Agent's routes" for name in (
        "start", "stop", "process", "cancel", "add_llm_server", "clear_llm_server")},
}  # fmt: skip

log = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


def answer(value: Any, status: int = 200) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def refusal(error: ServiceError) -> Response:
    """The error body of the contract, with Retry-After where waiting helps."""
    detail = {k: v for k, v in error.detail.items() if k != "retry_after_s"}
    body = {"error": {"code": error.code, "message": str(error), "detail": detail}}
    response = answer(body, error.status)
    if "retry_after_s" in error.detail:
        response.headers["Retry-After"] = str(error.detail["retry_after_s"])
    return response


async def read_body(request: Request) -> bytes:
    """The whole body.

    Raises:
        ServiceError: 413, larger than the limit; 415, not JSON by its own word.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if content_type != "application/json":
        raise ServiceError(415, "unsupported_media_type", f"content-type {content_type!r}: send application/json")
    announced = request.headers.get("content-length", "0")
    chunks, size = [], int(announced) if announced.isdecimal() else 0
    if size <= MAX_BODY:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_BODY:
                break
            chunks.append(chunk)
    if size > MAX_BODY:
        raise ServiceError(413, "too_large", f"body of over {MAX_BODY} bytes: send fewer tasks at a time")
    return b"".join(chunks)


def parse(body: bytes, kind: type[T]) -> T:
    """The body as a request record.

    Raises:
        ServiceError: 400, naming the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        where = re.search(r"`\$\.?([^`]*)`", message)
        unknown = re.search(r"unknown field `(\w+)`", message)
        field = unknown[1] if unknown else (where[1] if where else "body")
        raise ServiceError(400, "invalid", f"{field or 'body'}: {message}", field=field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ServiceError(400, "invalid", f"body: not JSON: {error}", field="body") from error


def query(request: Request, name: str, kind: Callable[[str], T], default: T, low: float | None = None) -> T:
    """A query parameter.

    Raises:
        ServiceError: 400, not of its kind or below `low`.
    """
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = kind(text)
    except ValueError as error:
        raise ServiceError(400, "invalid", f"{name}: {text!r} is not {kind.__name__}", field=name) from error
    if low is not None and not low <= value < float("inf"):  # type: ignore[operator]
        raise ServiceError(400, "invalid", f"{name}: {text!r} is not a number from {low:g}", field=name)
    return value


class Service:
    """The handlers, one a route; each is a few lines over the object that knows."""

    def __init__(
        self, router: Router, rollouts: Rollouts, leasing: Leasing, replicas: Replicas, members: Callable[[], list[Any]]
    ) -> None:
        self._router, self._rollouts, self._leasing, self._replicas = router, rollouts, leasing, replicas
        self._members = members

    async def submit(self, request: Request) -> Response:
        body = await read_body(request)
        key = request.headers.get("idempotency-key")
        return answer(await self._rollouts.submit(parse(body, RolloutsIn), key, body), 202)

    async def rollout(self, request: Request) -> Response:
        return answer(await self._rollouts.rollout(request.path_params["id"]))

    async def group(self, request: Request) -> Response:
        return answer(await self._rollouts.group(request.path_params["id"]))

    async def listing(self, request: Request) -> Response:
        params = request.query_params
        return answer(await self._rollouts.listing(params.get("state"), params.get("tag"), params.get("after")))

    async def results(self, request: Request) -> Response:
        after = query(request, "after", int, 0, 0)
        wait_s = min(query(request, "wait_s", float, 0.0, 0), MAX_WAIT_S)
        limit = query(request, "limit", int, 1000, 1)
        rows = request.query_params.get("rows", "0") not in {"0", "false", ""}
        lines, upto = await self._rollouts.results(after, request.query_params.get("tag"), wait_s, limit, rows)
        return Response(encode_lines(lines), 200, {"X-Next-After": str(upto)}, "application/x-ndjson")

    async def trajectory(self, request: Request) -> Response:
        return answer(await self._rollouts.trajectory(request.path_params["id"]))

    async def cancel_rollout(self, request: Request) -> Response:
        return answer(await self._rollouts.cancel(rollout_id=request.path_params["id"]), 202)

    async def cancel_group(self, request: Request) -> Response:
        return answer(await self._rollouts.cancel(group_id=request.path_params["id"]), 202)

    async def lease(self, request: Request) -> Response:
        asked = parse(await read_body(request), LeaseIn)
        bounded = msgspec.structs.replace(asked, wait_s=min(asked.wait_s, MAX_WAIT_S))
        return answer(await self._leasing.lease(bounded, request.is_disconnected))

    async def heartbeat(self, request: Request) -> Response:
        return answer(await self._leasing.heartbeat(parse(await read_body(request), HeartbeatIn)))

    async def commit(self, request: Request) -> Response:
        return answer(await self._leasing.commit(parse(await read_body(request), CommitsIn)))

    async def member_gone(self, request: Request) -> Response:
        member = request.path_params["id"]
        await self._replicas.remove(member, "its process ended")
        return answer({"freed": await self._leasing.gone(member, "its process ended")})

    async def policy(self, request: Request) -> Response:
        version = self._router.ledger.state.policy_version
        return answer({"version": version, "replicas": self._replicas.policy_view()})

    async def set_policy(self, request: Request) -> Response:
        return answer(await self._replicas.set_policy(parse(await read_body(request), PolicyIn)))

    async def replicas(self, request: Request) -> Response:
        return answer({"replicas": self._replicas.listing()})

    async def replica_joins(self, request: Request) -> Response:
        return answer(await self._replicas.join(parse(await read_body(request), ReplicaIn)))

    async def replica_leaves(self, request: Request) -> Response:
        return answer(await self._replicas.leave(request.path_params["id"]))

    async def open_session(self, request: Request) -> Response:
        return answer(await self._replicas.open_session(parse(await read_body(request), SessionIn)))

    async def close_session(self, request: Request) -> Response:
        return answer(await self._replicas.close_session(request.path_params["id"]))

    async def drain(self, request: Request) -> Response:
        # The file makes it last: the next router, if this one dies, goes on draining.
        await asyncio.to_thread(control.request, self._router.layout.root, "drain")
        await self._router.submit(Draining(t=self._router.clock()))
        return answer({"state": "draining"}, 202)

    async def status(self, request: Request) -> Response:
        view = status_view(self._router.ledger)
        fence = self._router.probed._asdict()
        return answer({**view, "fence": fence, "fleet": self._replicas.listing(), "members": self._members()})

    async def metrics(self, request: Request) -> Response:
        text = render(self._router, self._replicas.pressure.readings, self._leasing.loads)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def healthz(self, request: Request) -> Response:
        return answer({"status": "ok", "epoch": self._router.epoch})

    async def readyz(self, request: Request) -> Response:
        self._router.check_open()
        return answer({"status": "ready", "epoch": self._router.epoch})


def create_app(service: Service, tokens: Tokens) -> Starlette:
    """All routes, each behind its role; /healthz, /readyz and /metrics are open."""
    s = service
    table: list[tuple[str, str, Handler, frozenset[Role] | None]] = [
        ("POST", "/v1/rollouts", s.submit, TRAINER),
        ("GET", "/v1/rollouts", s.listing, TRAINER),
        ("GET", "/v1/rollouts/{id}", s.rollout, TRAINER),
        ("DELETE", "/v1/rollouts/{id}", s.cancel_rollout, TRAINER),
        ("GET", "/v1/groups/{id}", s.group, TRAINER),
        ("DELETE", "/v1/groups/{id}", s.cancel_group, TRAINER),
        ("GET", "/v1/results", s.results, TRAINER),
        ("GET", "/v1/trajectories/{id}", s.trajectory, TRAINER),
        ("GET", "/v1/policy", s.policy, BOTH),
        ("POST", "/v1/policy", s.set_policy, TRAINER),
        ("GET", "/v1/replicas", s.replicas, BOTH),
        ("POST", "/v1/replicas", s.replica_joins, BOTH),
        ("DELETE", "/v1/replicas/{id}", s.replica_leaves, BOTH),
        ("POST", "/v1/sessions", s.open_session, WORKER),
        ("DELETE", "/v1/sessions/{id}", s.close_session, WORKER),
        ("POST", "/v1/lease", s.lease, WORKER),
        ("POST", "/v1/heartbeat", s.heartbeat, WORKER),
        ("POST", "/v1/commit", s.commit, WORKER),
        ("DELETE", "/v1/members/{id}", s.member_gone, WORKER),
        ("POST", "/v1/drain", s.drain, BOTH),
        ("GET", "/v1/status", s.status, BOTH),
        ("GET", "/metrics", s.metrics, None),
        ("GET", "/healthz", s.healthz, None),
        ("GET", "/readyz", s.readyz, None),
    ]
    table += [(method, path, _not_built(what), TRAINER) for (method, path), what in NOT_BUILT.items()]
    routes = [Route(path, _guarded(handler, tokens, roles), methods=[method]) for method, path, handler, roles in table]
    return Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})


def _not_built(what: str) -> Handler:
    async def handler(request: Request) -> Response:
        raise ServiceError(501, "not_built", f"{request.method} {request.url.path}: {what} is not built yet")

    return handler


async def _no_route(request: Request, error: Exception) -> Response:
    return refusal(ServiceError(404, "not_found", f"no route {request.method} {request.url.path}"))


def _guarded(handler: Handler, tokens: Tokens, roles: frozenset[Role] | None) -> Handler:
    async def guarded(request: Request) -> Response:
        try:
            if roles is not None:
                tokens.check(request.headers.get("authorization"), roles)
            return await handler(request)
        except ServiceError as error:
            return refusal(error)
        except FencedError as error:
            return refusal(ServiceError(409, "stale_epoch", str(error)))
        except JournalError as error:
            return refusal(ServiceError(503, "journal_stalled", str(error), retry_after_s=2))
        except ShardError as error:
            return refusal(ServiceError(503, "not_visible", str(error), retry_after_s=5))
        except ClientDisconnect:
            raise
        except Exception as error:  # the last boundary: whatever broke, the client gets the contract's error body
            log.exception("%s %s", request.method, request.url.path)
            message = f"{type(error).__name__} in the router; its log has the rest"
            return refusal(ServiceError(500, "internal", message))

    return guarded
