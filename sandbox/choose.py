"""Picks the backend."""

from __future__ import annotations

from pathlib import Path

from sandbox.bubblewrap import BubblewrapBackend
from sandbox.protocols import SandboxBackend


async def choose(name: str, scratch: Path) -> SandboxBackend:
    backend = BubblewrapBackend(scratch)
    await backend.probe()
    return backend
