"""The command line of an Apptainer sandbox: the mounts made before it, its options, and the program in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sandbox.mountplan import IPC, MERGED, Mount

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = {
    "ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}  # fmt: skip

CONFIG = "config"
"""Apptainer's own configuration directory, relative to the sandbox's: it would make one in the user's home."""
DEV = "dev"
ENDING = "ending"
"""File, relative to the sandbox's directory, that holds `ENDED` alone once the program has ended by itself."""
ENDED = "ended\n"

FSTAB = "fstab"
_ENTER = (
    f'{IPC}cd "$1" || exit 71; shift; mount -n -a -T {FSTAB} || exit 72; hostname sandbox || exit 73; '
    'echo 0 >/proc/sys/user/max_user_namespaces || exit 74; exec "$@"'
)
_WATCH = f'exec 7>&2 2>{ENDING}; (exec "$@" 2>&7 7>&-); s=$?; echo ended >>{ENDING}; exit $s'
"""A shell says on its own stderr that a signal has ended what it ran: Apptainer, which nothing in there can reach."""
_CLEAN = (
    '[ -z "$1" ] || ulimit -u "$1" 2>/dev/null; shift; for v in $(compgen -e); do unset -v "$v"; done; '
    'while [ "$1" != -- ]; do export "$1"; shift; done; shift; cd "$1" || exit 71; unset -v OLDPWD; shift; exec "$@"'
)


def mounts(overlays: Sequence[Mount], shm_mib: int) -> str:
    """What is mounted before Apptainer starts, as one table for one call of mount; relative to the sandbox's directory.

    Args:
        overlays: in mounting order.
        shm_mib: size of /dev/shm.
    """
    lines = [f"{one.source} {one.mount_at} {one.kind} {one.options}" for one in overlays]
    lines += [f"/dev/{name} {DEV}/{name} none bind" for name in DEVICES]
    lines.append(f"devpts {DEV}/pts devpts newinstance,ptmxmode=0666,mode=0620,nosuid,noexec")
    lines.append(f"tmpfs {DEV}/shm tmpfs size={shm_mib}m,mode=1777,nosuid,nodev")
    return "".join(f"{line} 0 0\n" for line in lines)


def apptainer_argv(
    directory: Path,
    overlays: Sequence[Mount],
    env: Mapping[str, str],
    program: Sequence[str],
    *,
    read_only: Sequence[str],
    cwd: str = "/",
    alone: bool = False,
    processes: int | None = None,
) -> list[str]:
    """The whole command line.

    The overlays are mounted by us, with `userxattr`, in a user namespace that we make, and Apptainer gets the merged
    directory as a writable image. Its own `--overlay` mounts without that option in a user namespace: a directory of a
    lower layer can then not be removed (EIO; Apptainer 1.4.5, Linux 6.18). So layers mean the same under both backends.

    In that namespace Apptainer takes itself for root, for an ordinary user too, and needs no other namespace for users:
    none is left to be made, so the agent cannot make one either. All its capabilities are dropped. System V memory
    lies in a namespace of ours, see `IPC`. Whatever a site's
    apptainer.conf mounts into containers is left out. /dev is ours, small and read-only, with a terminal and a shared
    memory of its own: Apptainer's is a writable tmpfs without a limit. It does not take what is mounted in the merged
    directory along: the host's /usr is bound again.

    Apptainer loses the signal that should end it with its parent, because it executes itself anew from another thread.
    So it lives in a process namespace whose first process is a shell that keeps that signal.

    Args:
        directory: the sandbox's own, where `dev/`, the overlays' directories and the table of `mounts` are.
        overlays: in mounting order.
        env: the program's whole environment.
        program: by its absolute path, and its arguments.
        read_only: those of `KERNEL_FILES` that this kernel has.
        cwd: where the program starts.
        alone: it is process 1 of its namespace; otherwise a small init of Apptainer's is, which reaps.
        processes: most processes in it; see `sandbox.mountplan.enter_argv`.
    """
    binds = [f"{one.mount_at}:{one.mount_at.removeprefix(MERGED)}" for one in overlays if one.mount_at != MERGED]
    binds += [f"{DEV}:/dev:ro", *(f"{path}:{path}:ro" for path in read_only)]
    variables = [f"{name}={value}" for name, value in env.items()]
    return [
        "unshare", "--user", "--map-root-user", "--mount", "--cgroup", "--uts", "--ipc",
        "--propagation", "private", "--",
        "/bin/sh", "-c", _ENTER, "sh", str(directory),
        "setpriv", "--pdeathsig", "KILL", "--", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--",
        "/bin/sh", "-c", _WATCH, "sh",
        "apptainer", "--silent", "--nocolor", "exec", "--writable", "--contain", "--pid", "--cleanenv", "--no-home",
        "--no-privs", "--net", "--network", "none", *(["--no-init"] if alone else []),
        "--no-mount", "sys,dev,home,tmp,hostfs,cwd,bind-paths", "--bind", ",".join(binds), "--pwd", "/", MERGED,
        "/bin/bash", "--norc", "--noprofile", "-c", _CLEAN, "bash", str(processes or ""), *variables, "--", cwd,
        *program,
    ]  # fmt: skip
