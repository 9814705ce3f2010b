"""Errors of the embedded engine: what keeps it from starting, and what it refuses of a request."""

from __future__ import annotations

from stages.errors import StageError


class EngineError(StageError):
    """The engine cannot start or go on: a model directory, an option or the room for keys and values is unusable."""


class RequestError(EngineError):
    """One request is refused; carries the fields of vLLM's error object.

    Args:
        message: what is wrong with the request, as vLLM words it where vLLM has the same case.
        status: the HTTP code.
        kind: vLLM's error type ("BadRequestError", "Bad Request", "NotFoundError").
        param: the field that is wrong, if it is one.
    """

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message, status=status, kind=kind, param=param)
        self.status = status
        self.kind = kind
        self.param = param
