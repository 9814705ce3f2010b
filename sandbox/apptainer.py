"""The Apptainer backend: one `apptainer exec` a sandbox, on the same layers as bubblewrap has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from sandbox.apptainer_plan import (
    CONFIG,
    DEV,
    DEVICE_LINKS,
    DEVICES,
    ENDED,
    ENDING,
    FSTAB,
    apptainer_argv,
    mounts,
)
from sandbox.bashtext import BASE_ENV
from sandbox.bubblewrap import BubblewrapBackend, BubblewrapGround
from sandbox.errors import SandboxUnavailable
from sandbox.ground import Entry, Ground
from sandbox.mountplan import KERNEL_FILES
from sandbox.probe import require_programs
from sandbox.protocols import SandboxSpec


class ApptainerGround(BubblewrapGround):
    """One sandbox's directory: its root as bubblewrap has it, and a small /dev beside it."""

    def _lay(self) -> None:
        super()._lay()
        (self.directory / CONFIG).mkdir(mode=0o700)
        dev = self.directory / DEV
        for path in (dev, dev / "pts", dev / "shm"):
            path.mkdir()
            path.chmod(0o755)
        for name in DEVICES:
            (dev / name).touch()
        for name, target in DEVICE_LINKS.items():
            (dev / name).symlink_to(target)
        (self.directory / FSTAB).write_text(mounts(self._mounts, self.spec.limits.shm_mib))

    def _enter(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, *, alone: bool) -> Entry:
        line = apptainer_argv(
            self.directory, self._mounts, env, argv, cwd=cwd, alone=alone, processes=self._processes,
            read_only=[path for path in KERNEL_FILES if Path(path).exists()],
        )  # fmt: skip
        own = {
            "PATH": os.environ.get("PATH", "") + ":" + BASE_ENV["PATH"],
            "APPTAINER_CONFIGDIR": str(self.directory / CONFIG),
        }
        return Entry(tuple(line), own, "/", self.directory / ENDING, ENDED, self._given)


class ApptainerBackend(BubblewrapBackend):
    """See `SandboxBackend`; its workers' private directory holds the host's skeleton, as bubblewrap's does."""

    name = "apptainer"

    async def probe(self) -> None:
        """See `SandboxBackend.probe`."""
        if shutil.which("apptainer") is None:
            raise SandboxUnavailable(
                "apptainer not found in PATH; on a cluster try `module load apptainer`, on Debian 12 run as root: "
                "sh launch/apptainer.sh",
                boundary="probe",
            )
        require_programs("unshare", "setpriv", "mount", "hostname", "bash")
        await self._probe_layers()

    def _ground(self, spec: SandboxSpec, home: Path, directory: Path) -> Ground:
        return ApptainerGround(spec, directory, home / "skeleton", self._processes, copied=self.copied)
