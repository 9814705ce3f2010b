"""Who a process is on its cluster: node, boot and PID namespace, so that a dead one can be told from a silent one."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import msgspec

from sandbox.procfields import boot_id


class Identity(msgspec.Struct, frozen=True):
    """Where a process runs; `boot` and `pid_namespace` make its pid comparable with another's."""

    node: str
    pid: int
    boot: str = ""
    pid_namespace: str = ""


def here() -> Identity:
    """This process."""
    return Identity(node_name(), os.getpid(), boot_id(), _pid_namespace())


def node_name() -> str:
    """This node as Slurm names it inside a job, else as it names itself."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def member_id(kind: str, number: int) -> str:
    """A member's id, unique an incarnation: `run-1-3f9ac2`."""
    return f"{kind}-{number}-{secrets.token_hex(3)}"


def is_surely_dead(other: Identity) -> bool:
    """True only where this process can know: same boot and PID namespace, and no process of that pid."""
    mine = here()
    comparable = mine.boot and (mine.boot, mine.pid_namespace) == (other.boot, other.pid_namespace)
    return bool(comparable) and not Path(f"/proc/{other.pid}").exists()


def slurm_job_id() -> str | None:
    """The Slurm job that this process runs in, if any."""
    return os.environ.get("SLURM_JOB_ID")


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
