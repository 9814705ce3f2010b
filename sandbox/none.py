"""The backend without isolation: bash in a plain directory, for trusted agents, chosen by name only."""

from __future__ import annotations

import logging
from pathlib import Path

from sandbox.directory import DirectoryGround
from sandbox.ground import Ground
from sandbox.limits import UNBOUNDED, Bounds
from sandbox.probe import require_programs
from sandbox.protocols import SandboxSpec
from sandbox.pty_backend import PtyBackend
from sandbox.smalllayers import KnownLayers

_log = logging.getLogger(__name__)
WARNING = (
    "sandbox=none: commands run on this machine without isolation, with this user's rights, files and network; "
    "for trusted agents only"
)


class NoneBackend(PtyBackend):
    """See `SandboxBackend`; warns once."""

    name = "none"
    _warned = False

    def __init__(self, scratch: Path, bounds: Bounds = UNBOUNDED) -> None:
        super().__init__(scratch, bounds)
        self._known = KnownLayers()

    async def probe(self) -> None:
        """Check that there is a bash; promises nothing else."""
        require_programs("bash")
        self._warn()

    def _furnish(self, home: Path) -> None:
        self._warn()

    def _warn(self) -> None:
        if not NoneBackend._warned:
            NoneBackend._warned = True
            _log.warning(WARNING)

    def _ground(self, spec: SandboxSpec, home: Path, directory: Path) -> Ground:
        return DirectoryGround(spec, directory, self._known)
