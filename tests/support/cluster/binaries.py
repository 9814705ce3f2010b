"""Where Slurm's programs are: this system's, or a directory into which another release was unpacked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster.errors import ClusterError

PREFIX_VARIABLE = "ROLLMILL_TEST_SLURM"
"""Names the directory of an unpacked Slurm; without it the system's is taken."""
NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
NEEDED_FOR_ACCOUNTING = ("slurmdbd", "sacctmgr", "sacct", "mariadbd", "mariadb-install-db")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Binaries:
    """Slurm's programs of one installation."""

    prefix: Path | None = None

    @classmethod
    def chosen(cls) -> Binaries:
        """Those of the environment's choice."""
        prefix = os.environ.get(PREFIX_VARIABLE)
        return cls(Path(prefix) if prefix else None)

    @property
    def path(self) -> str:
        """PATH with these programs first."""
        return f"{self.prefix}/usr/bin:{self.prefix}/usr/sbin:{SYSTEM_PATH}" if self.prefix else SYSTEM_PATH

    def find(self, program: str) -> str:
        """The program's path.

        Raises:
            ClusterError: it is not there.
        """
        found = shutil.which(program, path=self.path)
        if found is None:
            raise ClusterError(
                f"test cluster: {program} is not there; `sh launch/bootstrap.sh test` as root installs it"
            )
        return found

    def check(self, *, accounting: bool) -> None:
        """Find every program that a cluster needs.

        Raises:
            ClusterError: one is not there.
        """
        for program in NEEDED + (NEEDED_FOR_ACCOUNTING if accounting else ()):
            self.find(program)

    @property
    def version(self) -> tuple[int, int]:
        """Slurm's major release, as (22, 5)."""
        text = subprocess.run([self.find("slurmctld"), "-V"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"(\d+)\.(\d+)", text)
        if found is None:
            raise ClusterError(f"test cluster: slurmctld -V answered {text!r}, which names no version")
        return int(found[1]), int(found[2])

    @property
    def plugins(self) -> Path | None:
        """The unpacked plugins' directory; None: where the programs look by themselves."""
        if self.prefix is None:
            return None
        return next(self.prefix.glob("usr/lib/*/slurm-wlm"))

    @property
    def step_daemon(self) -> list[str]:
        """Options that tell slurmd where its step daemon is."""
        return ["-d", f"{self.prefix}/usr/sbin/slurmstepd"] if self.prefix else []
