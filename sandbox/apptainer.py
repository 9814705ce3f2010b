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
from sandbox.bashtext import BASE_ENV, SHELL_ARGV, shell_env
from sandbox.bubblewrap import BubblewrapGround
from sandbox.errors import SandboxUnavailable
from sandbox.ground import Entry, Ground
from sandbox.hostroot import build_skeleton
from sandbox.mountplan import KERNEL_FILES
from sandbox.probe import probe_isolation, require_programs
from sandbox.protocols import SandboxSpec
from sandbox.pty_backend import PtyBackend


class ApptainerGround(BubblewrapGround):
    """One sandbox's directory: the overlays as bubblewrap has them, and a small /dev beside them."""

    def prepare(self) -> Entry:
        """See `Ground.prepare`."""
        super().prepare()
        (self.directory / CONFIG).mkdir(mode=0o700)
        dev = self.directory / DEV
        for path in (dev, dev / "pts", dev / "shm"):
            path.mkdir()
            path.chmod(0o755)
        for name in DEVICES:
            (dev / name).touch()
        for name, target in DEVICE_LINKS.items():
            (dev / name).symlink_to(target)
        (self.directory / FSTAB).write_text(mounts(self._overlays, self.spec.limits.shm_mib))
        return self._entry(("/bin/bash", *SHELL_ARGV), shell_env(self.spec.env), "/")

    def enter(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> Entry:
        """See `Ground.enter`."""
        return self._entry(argv, env, cwd, alone=True)

    def _entry(self, program: Sequence[str], env: Mapping[str, str], cwd: str, *, alone: bool = False) -> Entry:
        argv = apptainer_argv(
            self.directory, self._overlays, env, program, cwd=cwd, alone=alone, processes=self._processes,
            read_only=[path for path in KERNEL_FILES if Path(path).exists()],
        )  # fmt: skip
        own = {
            "PATH": os.environ.get("PATH", "") + ":" + BASE_ENV["PATH"],
            "APPTAINER_CONFIGDIR": str(self.directory / CONFIG),
        }
        return Entry(tuple(argv), own, "/", self.directory / ENDING, ENDED)


class ApptainerBackend(PtyBackend):
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
        await probe_isolation(self, await self._open_home())

    def _ground(self, spec: SandboxSpec, home: Path, directory: Path) -> Ground:
        return ApptainerGround(spec, directory, home / "skeleton", self._processes)

    def _furnish(self, home: Path) -> None:
        build_skeleton(home / "skeleton")
