"""The router's HTTP surface: routes, roles, errors and limits."""

# ruff: noqa: D102 - the table in create_app says which route each handler answers

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from stages import control
from stages.errors import FencedError, JournalError, ServiceError, ShardError
from stages.ledger.events import Draining
from stages.router import compat_gym, compat_prorl, events, openapi
from stages.router.auth import Role, Tokens
from stages.router.core import Router
from stages.router.leasing import Leasing
from stages.router.metrics import render
from stages.router.openapi import Handler, Param, Spec
from stages.router.replicas import Replicas
from stages.router.requests import answer, parse, query, read_body, refusal
from stages.router.rollouts import Rollouts, encode_lines
from stages.router.views import status_view
from stages.web import ClientDisconnect, Request, Response, Route, Starlette, StreamingResponse
from stages.wire import CommitsIn, HeartbeatIn, LeaseIn, PolicyIn, ReplicaIn, RolloutsIn, SessionIn

MAX_WAIT_S: Final = 60.0
TRAINER: Final = frozenset[Role]({"trainer"})
WORKER: Final = frozenset[Role]({"worker"})
BOTH: Final = TRAINER | WORKER

log = logging.getLogger(__name__)


class Service:
    """The handlers, one a route; each is a few lines over the object that knows."""

    def __init__(
        self, router: Router, rollouts: Rollouts, leasing: Leasing, replicas: Replicas, members: Callable[[], list[Any]]
    ) -> None:
        self._router, self._rollouts, self._leasing, self._replicas = router, rollouts, leasing, replicas
        self._members = members

    @property
    def compat(self) -> compat_prorl.Parts:
        """What other systems' routes are made of."""
        return compat_prorl.Parts(self._router, self._rollouts, self._replicas)

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

    async def events(self, request: Request) -> Response:
        last = request.headers.get("last-event-id", "")
        after = int(last) if last.isdecimal() and len(last) < 19 else query(request, "after", int, 0, 0)
        sent = events.stream(self._router, after, request.query_params.get("tag"))
        return StreamingResponse(sent, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

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
        text = render(self._router, self._replicas.pressure.readings, self._leasing.loads, self._leasing.spent)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def healthz(self, request: Request) -> Response:
        return answer({"status": "ok", "epoch": self._router.epoch})

    async def readyz(self, request: Request) -> Response:
        self._router.check_open()
        return answer({"status": "ready", "epoch": self._router.epoch})


_AFTER: Final = Param("after", "integer", "the seq to go on from", low=0)
HOT: Final = frozenset({"/v1/sessions", "/v1/lease", "/v1/commit", "/v1/heartbeat"})
"""Where the requests go that every rollout costs."""
_TAG: Final = Param("tag", "string", "only lines of this tag")


def _specs(s: Service) -> list[Spec]:
    """The native routes. Those without roles are open."""
    return [
        Spec("POST", "/v1/rollouts", s.submit, TRAINER, "ask for rollouts", RolloutsIn, status=202,
             headers=(Param("Idempotency-Key", "string", "the same key and body is accepted once", max_length=512),)),
        Spec("GET", "/v1/rollouts", s.listing, TRAINER, "rollouts by pages", query=(
             Param("state", "string", "only of this state"), _TAG, Param("after", "string", "`next` of a page"))),
        Spec("GET", "/v1/rollouts/{id}", s.rollout, TRAINER, "one rollout"),
        Spec("DELETE", "/v1/rollouts/{id}", s.cancel_rollout, TRAINER, "cancel a rollout", status=202),
        Spec("GET", "/v1/groups/{id}", s.group, TRAINER, "one group"),
        Spec("DELETE", "/v1/groups/{id}", s.cancel_group, TRAINER, "cancel a group", status=202),
        Spec("GET", "/v1/results", s.results, TRAINER, "published lines after a seq", media="application/x-ndjson",
             query=(_AFTER, _TAG, Param("wait_s", "number", "long poll; 60 at most", low=0),
                    Param("limit", "integer", "lines at most", low=1), Param("rows", "string", "1: rollouts too"))),
        Spec("GET", "/v1/trajectories/{id}", s.trajectory, TRAINER, "a committed row"),
        Spec("GET", "/v1/events", s.events, TRAINER, "published lines as server-sent events",
             media="text/event-stream", query=(_AFTER, _TAG)),
        Spec("GET", "/v1/policy", s.policy, BOTH, "the policy version"),
        Spec("POST", "/v1/policy", s.set_policy, TRAINER, "set the policy version", PolicyIn),
        Spec("GET", "/v1/replicas", s.replicas, BOTH, "the fleet"),
        Spec("POST", "/v1/replicas", s.replica_joins, BOTH, "add an engine", ReplicaIn),
        Spec("DELETE", "/v1/replicas/{id}", s.replica_leaves, BOTH, "drain an engine and remove it"),
        Spec("POST", "/v1/sessions", s.open_session, WORKER, "where an attempt generates", SessionIn),
        Spec("DELETE", "/v1/sessions/{id}", s.close_session, WORKER, "end a session"),
        Spec("POST", "/v1/lease", s.lease, WORKER, "take work", LeaseIn),
        Spec("POST", "/v1/heartbeat", s.heartbeat, WORKER, "renew leases", HeartbeatIn),
        Spec("POST", "/v1/commit", s.commit, WORKER, "hand in results", CommitsIn),
        Spec("DELETE", "/v1/members/{id}", s.member_gone, WORKER, "a member's process has ended"),
        Spec("POST", "/v1/drain", s.drain, BOTH, "lease nothing more", status=202),
        Spec("GET", "/v1/status", s.status, BOTH, "how the run stands"),
        Spec("GET", "/", _not_built("the dashboard"), TRAINER, "the dashboard", status=501),
        Spec("GET", "/metrics", s.metrics, None, "Prometheus metrics", media="text/plain"),
        Spec("GET", "/healthz", s.healthz, None, "the process answers"),
        Spec("GET", "/readyz", s.readyz, None, "the journal takes events"),
    ]  # fmt: skip


def create_app(
    service: Service, tokens: Tokens, *, prorl: bool = False, gym_row: compat_gym.GymRow | None = None
) -> Starlette:
    """All routes, each behind its role; other systems' where they are switched on."""
    specs = _specs(service)
    specs += compat_prorl.specs(service.compat, TRAINER, on=prorl)
    specs += compat_gym.specs(service.compat, TRAINER, gym_row)
    document = msgspec.json.encode(openapi.document(specs))

    async def described(request: Request) -> Response:
        return Response(document, media_type="application/json")

    specs.append(Spec("GET", "/openapi.json", described, None, "this API"))
    routes = [Route(spec.path, _guarded(spec.handler, tokens, spec.roles), methods=[spec.method]) for spec in specs]
    routes.sort(key=lambda route: route.path not in HOT)  # they are tried one after the other
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
