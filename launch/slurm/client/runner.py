"""Runs one Slurm command: no shell, a deadline, an environment that cannot change what it prints, and a count of calls.

Inside a job the environment is full of SLURM_*, and on many machines of SQUEUE_FORMAT, SACCT_FORMAT and the like, each
of which changes a command's options. All are left out but the few that say where the cluster is and who asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from launch.slurm.client.errors import SlurmUnavailable

TIMEOUT_S: Final = 30.0
KEPT: Final = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_PREFIX"})
CALLS: Final[Counter[str]] = Counter()
"""Commands that this process has run, by name: every client adds to it."""
_CHANGING = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_", "SSHARE_")


class Output(NamedTuple):
    """What a command left: its exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """Its first line of complaint, without the command's own name before it."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        first = lines[0] if lines else f"exit code {self.code}"
        return first.split(": error: ")[-1].removeprefix("error: ")


class Runner(Protocol):
    """Runs a command to its end; `calls` counts by command."""

    calls: Counter[str]

    async def run(self, argv: Sequence[str], *, changes: bool = False) -> Output:
        """Run it; `changes` says that it may have had an effect when no answer came.

        Raises:
            SlurmUnavailable: there is no such command, or it did not end in time.
        """
        ...


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a Slurm command: nothing that changes its options, the C locale, and UTC."""
    kept = {
        name: value for name, value in environment.items() if name in KEPT or not name.upper().startswith(_CHANGING)
    }
    return {**kept, "LC_ALL": "C", "TZ": "UTC"}


class CommandRunner:
    """The real one."""

    def __init__(self, timeout_s: float = TIMEOUT_S, environment: Mapping[str, str] | None = None) -> None:
        self.calls: Counter[str] = CALLS
        self._timeout_s = timeout_s
        self._environment = environment

    async def run(self, argv: Sequence[str], *, changes: bool = False) -> Output:
        """Run a command in a session of its own, which is killed whole at the deadline."""
        self.calls[argv[0]] += 1
        environment = clean_environment(os.environ if self._environment is None else self._environment)
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, env=environment, start_new_session=True,
            )  # fmt: skip
        except (FileNotFoundError, PermissionError) as error:
            raise SlurmUnavailable(
                f"{argv[0]} cannot be run here: {error.strerror}; put Slurm's commands on the PATH",
                command=argv[0], no_command=True,
            ) from error  # fmt: skip
        try:
            out, err = await asyncio.wait_for(process.communicate(), self._timeout_s)
        except TimeoutError as error:
            raise SlurmUnavailable(
                f"{argv[0]} did not answer within {self._timeout_s:g} s; see `scontrol ping`",
                command=" ".join(argv), may_have_happened=changes,
            ) from error  # fmt: skip
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.shield(process.wait())
        return Output(process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace"))
