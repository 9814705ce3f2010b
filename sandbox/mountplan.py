"""Which overlays a sandbox is made of, and the command line that mounts them and enters. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sandbox.bashtext import SHELL_ARGV
from sandbox.errors import SandboxError

MAX_LAYERS = 8
"""A hundred lowers overflow the kernel's mount string, each costs every lookup; longer chains are squashed."""

MERGED = "merged"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the sandbox's own
KERNEL_FILES = ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/acpi", "/proc/fs", "/proc/sysrq-trigger")
"""Where root of the sandbox, when it is root outside too, could write by its ownership alone: made read-only.

bubblewrap does so by itself only where it sees that it may write the directory, which nobody may in /proc/sys.
"""
_IPC_MIB = 64
IPC = (
    f"{{ echo {_IPC_MIB * 1024 * 1024 // os.sysconf('SC_PAGE_SIZE')} >/proc/sys/kernel/shmall; "
    "echo 16 >/proc/sys/kernel/msgmni; echo 250 32000 100 128 >/proc/sys/kernel/sem; } 2>/dev/null; "
)
"""Bounds System V memory of the namespace that a shell is in: it belongs to no process, so nobody else sees it.

Only kernels that let the namespace's owner do so (some Linux 6) are bounded; elsewhere it stays as it is.
"""
_ENTER = (
    f"{IPC}"
    'cd "$1" || exit 71; shift; while [ "$1" != -- ]; do mount -n -t "$2" -o "$3" "$4" "$1" || exit 72; '
    'shift 4; done; shift; exec "$@"'
)


LIMIT = 'ulimit -u "$1" 2>/dev/null; shift; exec "$@"'
"""What a bash does whose first argument is the most processes that its namespace may have, and the rest a program."""


@dataclass(frozen=True)
class Overlay:
    """One overlay mount; every path but a lower's target is relative to the sandbox's own directory.

    Relative because the kernel splits its option string at colons and commas, and because the agent can read it in
    /proc/mounts: the lowers are links with short names.

    Args:
        mount_at: where it is mounted.
        lowers: link name -> the directory that it points to, highest first.
        upper: what is written goes here.
        work: overlayfs's own.
    """

    mount_at: str
    lowers: Mapping[str, Path]
    upper: str
    work: str
    kind: ClassVar[str] = "overlay"
    source: ClassVar[str] = "overlay"

    @property
    def options(self) -> str:
        """The mount's option string; `userxattr` is what an unprivileged overlay keeps its marks in."""
        return f"userxattr,lowerdir={':'.join(self.lowers)},upperdir={self.upper},workdir={self.work}"


@dataclass(frozen=True)
class Shown:
    """A directory of the host that is seen as it is, read-only.

    Args:
        source: the directory.
        mount_at: where it is mounted, relative to the sandbox's own directory.
    """

    source: str
    mount_at: str
    kind: ClassVar[str] = "none"
    options: ClassVar[str] = "bind,ro,nosuid,nodev"


Mount = Overlay | Shown
"""What a sandbox's root is made of before it is entered."""


def plan_overlays(image: str, skeleton: Path, layers: Sequence[Path], usr_layers: Sequence[Path]) -> list[Overlay]:
    """The overlays of a sandbox, in mounting order.

    Args:
        image: "host" or an image directory.
        skeleton: lowest layer of a host image; not used otherwise.
        layers: lowest first.
        usr_layers: those of them that hold a real directory `usr`, lowest first; matter to a host image alone.

    Raises:
        SandboxError: too many layers.
    """
    if len(layers) > MAX_LAYERS:
        raise SandboxError(
            f"{len(layers)} layers; at most {MAX_LAYERS} are stacked: squash the chain", boundary="start"
        )
    lowest = skeleton if image == "host" else Path(image)
    overlays = [_overlay(MERGED, "root", [*reversed(layers), lowest])]
    if image == "host":
        stack = [*(layer / "usr" for layer in reversed(usr_layers)), Path("/usr")]
        overlays.append(_overlay(f"{MERGED}/usr", "usr", stack))
    return overlays


def _overlay(mount_at: str, name: str, stack: Sequence[Path]) -> Overlay:
    lowers = {f"lower/{name}{number}": path for number, path in enumerate(stack)}
    return Overlay(mount_at, lowers, f"upper/{name}", f"wk/{name}")


def enter_argv(
    directory: Path, overlays: Sequence[Mount], env: Mapping[str, str], shm_mib: int,
    program: Sequence[str] = ("/bin/bash", *SHELL_ARGV), *, cwd: str = "/", alone: bool = False,
    processes: int | None = None,
) -> list[str]:  # fmt: skip
    """The command line: a user and mount namespace, the overlays, then bubblewrap and the program.

    bubblewrap enters a second user namespace with `--disable-userns`, so that the agent cannot make another and the
    kernel's privileged paths stay out of its reach. There is no `--new-session`: the pty is the sandbox's own, and job
    control needs it as controlling terminal. The namespace for System V memory is the outer one: there it is bounded.

    Args:
        directory: the sandbox's own.
        overlays: in mounting order, or what stands in their place.
        env: the program's whole environment.
        shm_mib: size of /dev/shm.
        program: and its arguments.
        cwd: where it starts.
        alone: it is process 1 of its namespace: nothing in there can kill it or holds what it holds, and its end is
            everybody's.
        processes: most processes in it. It is a resource limit that is set inside, by the program's own first
            process: outside it would be met by all that the user runs.
    """
    limited = () if processes is None else ("/bin/bash", "--norc", "--noprofile", "-c", LIMIT, "bash", str(processes))
    mounts = [word for one in overlays for word in (one.mount_at, one.kind, one.options, one.source)]
    return [
        "unshare", "--user", "--map-root-user", "--mount", "--ipc", "--propagation", "private", "--",
        "/bin/sh", "-c", _ENTER, "sh", str(directory), *mounts, "--",
        *bwrap_argv(directory / MERGED, env, shm_mib, cwd=cwd, alone=alone), *limited, *program,
    ]  # fmt: skip


def bwrap_argv(root: Path, env: Mapping[str, str], shm_mib: int, *, cwd: str = "/", alone: bool = False) -> list[str]:
    """The part of bwrap: the merged root and the namespaces."""
    variables = [word for name, value in env.items() for word in ("--setenv", name, value)]
    read_only = [word for path in KERNEL_FILES for word in ("--ro-bind-try", path, path)]
    return [
        "bwrap", "--bind", str(root), "/", "--proc", "/proc", *read_only, "--dev", "/dev",
        "--size", str(shm_mib * 1024 * 1024), "--perms", "1777", "--tmpfs", SHARED_MEMORY, "--remount-ro", "/dev",
        "--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-net", "--unshare-uts",
        "--unshare-cgroup-try", "--hostname", "sandbox", "--die-with-parent", "--cap-drop", "ALL", "--clearenv",
        *variables, *(["--as-pid-1"] if alone else []), "--chdir", cwd, "--",
    ]  # fmt: skip
