"""The API described by itself: an OpenAPI 3.1 document from the table of routes and the request records."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from stages.router.auth import Role
from stages.web import Request, Response

Handler = Callable[[Request], Awaitable[Response]]

ERRORS: Final = {
    "400": "a field is wrong; the message names it",
    "401": "no token",
    "403": "the other role's token",
    "404": "not known",
    "409": "ended already, superseded, a stale epoch, or an idempotency key with another body",
    "413": "too large",
    "415": "not JSON",
    "429": "too much is open; Retry-After says when to come again",
    "500": "a fault of the router's own",
    "501": "not built yet",
    "502": "engines refused",
    "503": "not now; Retry-After says when to come again",
}


class Param(NamedTuple):
    """A parameter of a route."""

    name: str
    kind: str
    about: str
    low: float | None = None
    max_length: int | None = None


class Spec(NamedTuple):
    """A route: what answers it, for whom, and what it takes and gives. No roles: open to everybody."""

    method: str
    path: str
    handler: Handler
    roles: frozenset[Role] | None
    about: str
    body: type[msgspec.Struct] | None = None
    status: int = 200
    media: str = "application/json"
    query: tuple[Param, ...] = ()
    headers: tuple[Param, ...] = ()


def document(specs: Sequence[Spec]) -> dict[str, Any]:
    """The document of these routes."""
    bodies = [spec.body for spec in specs if spec.body is not None]
    references, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(bodies, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for spec in specs:
        paths.setdefault(spec.path, {})[spec.method.lower()] = _operation(spec, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollmill", "version": "1", "description": "Rollouts as a service."},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "detail"],
            "properties": {
                "code": {"type": "string"}, "message": {"type": "string"}, "detail": {"type": "object"},
            },
        }
    },
}  # fmt: skip


def _operation(spec: Spec, by_type: dict[type[msgspec.Struct], dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": spec.about, "content": {spec.media: {}}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses = {code: {"description": about, "content": error} for code, about in ERRORS.items()}
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{spec.method.lower()}{spec.path}").strip("_"),
        "summary": spec.about,
        "parameters": [
            *(_param(Param(name, "string", name), "path") for name in re.findall(r"{(\w+)}", spec.path)),
            *(_param(param, "query") for param in spec.query),
            *(_param(param, "header") for param in spec.headers),
        ],
        "responses": {**responses, str(spec.status): answer},
    }
    if spec.body is not None:
        content = {"application/json": {"schema": by_type[spec.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    if spec.roles is not None:
        operation["security"] = [{"token": []}]
        operation["description"] = f"For the token of: {', '.join(sorted(spec.roles))}."
    return operation


def _param(param: Param, place: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": param.kind}
    if param.low is not None:
        schema["minimum"] = param.low
    if param.max_length is not None:
        schema["maxLength"] = param.max_length
    if place == "path":
        schema["minLength"] = 1
    return {
        "name": param.name, "in": place, "required": place == "path", "description": param.about, "schema": schema,
    }  # fmt: skip
