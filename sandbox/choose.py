"""Which backend a worker gets: the one that is named, or the fastest that proves that it isolates."""

from __future__ import annotations

from pathlib import Path

from sandbox.bubblewrap import BubblewrapBackend
from sandbox.errors import SandboxError, SandboxUnavailable
from sandbox.none import NoneBackend
from sandbox.protocols import SandboxBackend

NAMES = ("auto", "bubblewrap", "apptainer", "none")


async def choose(name: str, scratch: Path) -> SandboxBackend:
    """The backend, probed; the caller closes it.

    Args:
        name: "auto", "bubblewrap", "apptainer" or "none".
        scratch: node-local directory for the sandboxes.

    Raises:
        SandboxUnavailable: this machine or user cannot isolate; "auto" never falls back to no isolation.
        SandboxError: no backend has that name, or it is not built yet.
    """
    if name == "apptainer":
        raise SandboxError("sandbox=apptainer is not built yet: use sandbox=bubblewrap", boundary="probe")
    if name not in NAMES:
        raise SandboxError(f"sandbox={name!r} is none of {', '.join(NAMES)}", boundary="probe")
    backend: SandboxBackend = NoneBackend(scratch) if name == "none" else BubblewrapBackend(scratch)
    try:
        await backend.probe()
    except BaseException as error:  # whatever ends the probe, the backend is closed; raised again
        await backend.close()
        if name == "auto" and isinstance(error, SandboxUnavailable):
            raise SandboxUnavailable(
                f"no sandbox isolates on this machine: {error} "
                "(sandbox=none runs agents without isolation, if you trust them)",
                boundary="probe",
            ) from error
        raise
    return backend
