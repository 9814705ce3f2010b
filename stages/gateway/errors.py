"""Errors of the capture gateway: what a request is refused with, in words that each dialect's client knows to read."""

from __future__ import annotations

from typing import Literal

from stages.errors import StageError

Kind = Literal[
    "invalid_request", "authentication", "permission", "not_found", "too_large", "rate_limit", "overloaded", "server"
]


class RefusedError(StageError):
    """A request gets an error in place of an answer.

    Args:
        status: HTTP status.
        kind: of which sort it is; each dialect has its own name for it.
        message: for who reads it.
        code: OpenAI's machine-readable code, where there is one.
        param: the field that it is about.
    """

    def __init__(self, status: int, kind: Kind, message: str, *, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param


def invalid(message: str, param: str | None = None, code: str | None = None) -> RefusedError:
    """The request itself is wrong: trying it again would not help."""
    return RefusedError(400, "invalid_request", message, param=param, code=code)


def unknown_key() -> RefusedError:
    """The request shows no capability of a session that goes on."""
    return RefusedError(401, "authentication", "this key opens nothing, or its session is over")


def too_long(message: str, tokens: int, length: int) -> RefusedError:
    """The prompt does not fit; worded so that clients of either make take it for what it is.

    Args:
        message: what the stream or the engine said.
        tokens: of the prompt.
        length: the model's context.
    """
    error = invalid(
        f"prompt is too long: {tokens} tokens > {length} maximum. This model's maximum context length is {length} "
        f"tokens, the messages resulted in {tokens} tokens.",
        "messages",
        "context_length_exceeded",
    )
    error.detail["said"] = message
    return error
