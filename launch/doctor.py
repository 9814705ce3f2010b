"""What this machine and user can do for rollmill, found out by trying, each with what to ask for where it cannot."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sandbox.bubblewrap import BubblewrapBackend
from sandbox.cgroup import delegation, own_group
from sandbox.choose import ISOLATING, choose
from sandbox.errors import SandboxError
from sandbox.scratch import owned, remove_tree
from stages.errors import StageError
from stages.journal.fence import filesystem_of, probe
from stages.layout import RunLayout

SLURM_COMMANDS: Final = ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol", "sacct", "sshare")
SHARED: Final = frozenset({"lustre", "nfs", "nfs4", "gpfs", "beegfs", "cephfs", "ceph", "fuse.sshfs", "cifs", "smb3"})
"""Filesystems that no sandbox may write to: the kernel's overlay needs a local one."""
DEADLINE_S: Final = 20.0
_MOUNTS: Final = Path("/proc/self/mounts")


@dataclass(frozen=True)
class Check:
    """One thing that was tried.

    Args:
        name: of it.
        ok: it is there and works.
        found: what was seen.
        ask: what to do, or to ask the administrator for, where it does not.
        needed: a run cannot do without it.
    """

    name: str
    ok: bool
    found: str
    ask: str = ""
    needed: bool = False


def machine(scratch: Path) -> list[Check]:
    """Everything about this machine and user; takes a second or two.

    Args:
        scratch: node-local directory for what is tried.
    """
    checks = [_python(), _namespaces(), *_filesystem(scratch), _fuse(), *_backends(scratch), _control_groups()]
    return [*checks, *_slurm()]


def can_isolate(checks: list[Check]) -> bool:
    """Whether any backend isolates."""
    return any(check.ok for check in checks if check.name in ISOLATING)


def run_directory(run_dir: Path) -> list[Check]:
    """The filesystem of a run directory that is there or could be made, its fence, and its layout on Lustre."""
    standing = next(place for place in (run_dir, *run_dir.parents) if place.is_dir())
    kind = filesystem_of(standing.resolve(), _MOUNTS.read_text())
    checks = [Check("filesystem", ok=True, found=f"{kind} ({standing})")]
    try:
        found = _fence(RunLayout(run_dir), standing)
        checks.append(Check("fence", ok=True, found=found, needed=True))
    except (StageError, OSError) as error:
        ask = "choose a filesystem on which hard links work, that all nodes of the run see"
        checks.append(Check("fence", ok=False, found=str(error), ask=ask, needed=True))
    if kind == "lustre":
        checks.append(Check("stripes", ok=True, found=stripes(RunLayout(run_dir).shards)))
    return checks


def stripes(shards: Path) -> str:
    """The layout that is advised on Lustre.

    A shard is written by one worker, in appends of megabytes, up to 256 MB, and read by ranges: one server for the
    first of it is enough and keeps small runs cheap, more servers serve the readers of a full one.
    """
    return f"before the first start: lfs setstripe -E 64M -c 1 -S 4M -E -1 -c 4 -S 4M {shards}"


def _fence(layout: RunLayout, standing: Path) -> str:
    """Which fence holds; tried in the journal's directory, or in one like it beside where that is not there yet."""
    if layout.journal.is_dir():
        return probe(layout).kind
    place = Path(tempfile.mkdtemp(prefix=".rollmill-doctor-", dir=standing))
    try:
        tried = RunLayout(place)
        tried.journal.mkdir()
        return probe(tried).kind
    finally:
        remove_tree(place)


def _python() -> Check:
    found = f"{platform.python_version()} at {sys.executable}, Linux {platform.release()}"
    return Check("python", ok=sys.version_info >= (3, 11), found=found, ask="Python >= 3.11", needed=True)


def _namespaces() -> Check:
    ok, said = _tried("unshare", "--user", "--map-root-user", "--mount", "true")
    ask = "user namespaces for ordinary users: sysctl user.max_user_namespaces=65536, and on Debian and Ubuntu "
    ask += "kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0 where they exist"
    return Check("user namespaces", ok, "allowed" if ok else said, ask, needed=True)


def _filesystem(scratch: Path) -> list[Check]:
    """The scratch directory: its filesystem, its room, and whether the kernel stacks an overlay on it."""
    kind = filesystem_of(scratch.resolve(), _MOUNTS.read_text())
    room = shutil.disk_usage(scratch).free / 2**30
    ask = "cluster.scratch on a local ext4 or xfs disk with some 20 GiB of room"
    local = Check("scratch", kind not in SHARED and room >= 5, f"{scratch}: {kind}, {room:.0f} GiB free", ask)
    for name in ("lower", "upper", "work", "merged"):
        (scratch / name).mkdir()
    options = "userxattr,lowerdir=lower,upperdir=upper,workdir=work"
    ok, said = _tried(
        "unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
        f"cd {scratch.name} && mount -t overlay -o {options} overlay merged && mkdir merged/a && rmdir merged/a",
        cwd=scratch.parent,
    )  # fmt: skip
    ask = "Linux >= 5.11, and a scratch directory that is neither an overlay nor on the network; else starts are slow"
    return [local, Check("kernel overlay", ok, "works" if ok else said, ask)]


def _fuse() -> Check:
    ok, said = _tried("fuse-overlayfs", "--version")
    device = os.access("/dev/fuse", os.R_OK | os.W_OK)
    found = said if not ok else "there" if device else "there, but /dev/fuse may not be opened"
    ask = "nothing: no sandbox uses it; without the kernel's overlay image and layers are copied"
    return Check("fuse-overlayfs", ok and device, found, ask)


def _backends(scratch: Path) -> list[Check]:
    """Each backend's own isolation probe."""
    checks = []
    for name in ISOLATING:
        program = "bwrap" if name == "bubblewrap" else name
        _, version = _tried(program, "--version")
        try:
            copied = asyncio.run(_probed(name, scratch))
        except SandboxError as error:
            checks.append(Check(name, ok=False, found=str(error), ask=_package(name)))
        else:
            how = "isolates" if not copied else "isolates; copies image and layers for every sandbox"
            checks.append(Check(name, ok=True, found=f"{version}: {how}"))
    return checks


async def _probed(name: str, scratch: Path) -> bool:
    """Whether it makes copies, because there are no overlays here."""
    async with await choose(name, scratch) as backend:
        return isinstance(backend, BubblewrapBackend) and backend.copied


def _package(name: str) -> str:
    return f"the package {name}, and user namespaces; one of bubblewrap and apptainer is enough"


def _control_groups() -> Check:
    group = own_group(Path("/proc/self/cgroup").read_text(), _MOUNTS.read_text())
    ok, found = delegation(group)
    ask = "nothing: a watchdog and resource limits hold the limits; delegated groups are not used yet"
    return Check("cgroup delegation", ok, found, ask)


def _slurm() -> list[Check]:
    there = [name for name in SLURM_COMMANDS if shutil.which(name)]
    missing = [name for name in SLURM_COMMANDS if name not in there]
    if not there:
        return [Check("slurm", ok=False, found="no Slurm command in PATH", ask="only for runs on a cluster")]
    ok, said = _tried("sinfo", "--version")
    answers, why = _tried("sinfo", "--noheader", "--format=%P")
    found = f"{said}; " + (f"{len(why.split())} partitions" if answers else why)
    found += f"; missing: {', '.join(missing)}" if missing else ""
    needed = {"sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol"}
    ask = "a login node from which sbatch, srun, squeue, scancel, sinfo and scontrol work"
    return [Check("slurm", ok and answers and not needed & set(missing), found, ask)]


def _tried(*argv: str, cwd: Path | None = None) -> tuple[bool, str]:
    """Whether a command succeeds, and the first of what it said."""
    if shutil.which(argv[0]) is None:
        return False, f"{argv[0]} is not in PATH"
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    said = (done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}").splitlines()
    return done.returncode == 0, said[0] if argv[-1] == "--version" or done.returncode else " ".join(said)


def examine(scratch: Path, run_dir: Path | None, *, told: Callable[[str], None]) -> dict[str, list[Check]]:
    """All checks by what they are about: "machine", and "run directory" where one is named.

    Args:
        scratch: node-local directory; what is made in it is removed again.
        run_dir: may be missing yet.
        told: hears what comes next, for people who wait.
    """
    told("trying what sandboxes need")
    with owned(scratch, "doctor-") as place:
        found = {"machine": machine(place)}
    if run_dir is not None:
        told(f"trying {run_dir}")
        found["run directory"] = run_directory(run_dir)
    return found
