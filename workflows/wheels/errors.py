"""Errors of the wheels: what keeps an environment from being installed, and whether trying again can help."""

from __future__ import annotations

from workflows.errors import WorkflowError


class WheelError(WorkflowError):
    """Wheels could not be resolved, fetched or unpacked; trying again may help."""


class UnresolvableError(WheelError):
    """No set of wheels satisfies the requirements, or what they bring is refused: trying again cannot help."""
