"""Errors of the sandbox: one root that names the boundary that broke, and one class for each way it can break."""

from __future__ import annotations

from typing import Any


class SandboxError(Exception):
    """Root of what the sandbox raises.

    Args:
        message: what, where, measured, what to do.
        boundary: the part that broke: "start", "shell", "files", "layers", "images", "spawner", "python", "probe",
            "limits", "stop".
        detail: machine-readable facts about the failure.
    """

    def __init__(self, message: str, *, boundary: str = "sandbox", **detail: Any) -> None:
        super().__init__(message)
        self.boundary = boundary
        self.detail = detail


class SandboxUnavailable(SandboxError):
    """This machine or user cannot isolate; the message names what failed and what to ask for."""


class LimitExceeded(SandboxError):
    """The sandbox was ended because it used more than it may: its agent's doing, and no fault of the machine.

    Args:
        message: which limit, what was measured, what is allowed.
        limit: name of the bound, a key of `sandbox.limits`.
        measured: in the unit of the name.
        allowed: likewise.
    """

    def __init__(self, message: str, *, limit: str, measured: float = 0.0, allowed: float = 0.0) -> None:
        super().__init__(message, boundary="limits", limit=limit, measured=measured, allowed=allowed)
        self.limit = limit


class ShellDied(SandboxError):
    """The shell is gone and could not be started again."""


class PythonUnavailable(SandboxError):
    """No Python kernel starts in this sandbox; the message says what the image lacks, or what the kernel said."""


class FilesError(SandboxError):
    """A file operation inside the sandbox was refused or failed; `detail` holds `path` and, where known, `errno`."""


class LayerError(SandboxError):
    """A layer cannot be packed, is not what its digest says, or holds what no layer may hold."""


class ImageError(SandboxError):
    """An image cannot be read, holds what no image may hold, or is not in the store."""


class SpawnerError(SandboxError):
    """The process that starts shells is gone, or could not start one."""
