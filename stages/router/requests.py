"""Requests and answers of the router: bodies and parameters read, errors in the contract's form."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from stages.errors import ServiceError
from stages.web import Request, Response
from stages.wire import UNREADABLE

MAX_BODY: Final = 64 << 20
MAX_SEQ: Final = 2**63 - 1

T = TypeVar("T")


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
    except UNREADABLE as error:
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
    if low is not None and not (isinstance(value, (int, float)) and low <= value <= MAX_SEQ and math.isfinite(value)):
        raise ServiceError(400, "invalid", f"{name}: {text[:40]!r} is not a number from {low:g}", field=name)
    return value
