"""Which backend a worker gets: the one that is named, or the fastest that proves that it isolates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from sandbox.apptainer import ApptainerBackend
from sandbox.bubblewrap import BubblewrapBackend
from sandbox.errors import SandboxError, SandboxUnavailable
from sandbox.limits import UNBOUNDED, Bounds
from sandbox.none import NoneBackend
from sandbox.protocols import SandboxBackend

BACKENDS: Mapping[str, Callable[[Path, Bounds], SandboxBackend]] = {
    "bubblewrap": BubblewrapBackend,
    "apptainer": ApptainerBackend,
    "none": NoneBackend,
}
ISOLATING = ("bubblewrap", "apptainer")
"""What "auto" tries, the faster start first."""
NAMES = ("auto", *BACKENDS)


async def choose(name: str, scratch: Path, bounds: Bounds = UNBOUNDED) -> SandboxBackend:
    """The backend, probed; the caller closes it.

    Args:
        name: "auto", "bubblewrap", "apptainer" or "none".
        scratch: node-local directory for the sandboxes.
        bounds: what each of them may use.

    Raises:
        SandboxUnavailable: this machine or user cannot isolate; "auto" never falls back to no isolation.
        SandboxError: no backend has that name.
    """
    if name not in NAMES:
        raise SandboxError(f"sandbox={name!r} is none of {', '.join(NAMES)}", boundary="probe")
    if name != "auto":
        return await _probed(name, scratch, bounds)
    refused = []
    for candidate in ISOLATING:
        try:
            return await _probed(candidate, scratch, bounds)
        except SandboxUnavailable as error:
            refused.append(f"{candidate}: {error}")
    raise SandboxUnavailable(
        f"no sandbox isolates on this machine; {'; '.join(refused)} "
        "(sandbox=none runs agents without isolation, if you trust them)",
        boundary="probe",
    )


async def _probed(name: str, scratch: Path, bounds: Bounds) -> SandboxBackend:
    backend = BACKENDS[name](scratch, bounds)
    try:
        await backend.probe()
    except BaseException:  # whatever ends the probe, the backend is closed; raised again
        await backend.close()
        raise
    return backend
