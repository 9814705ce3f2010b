"""The files and directories that jobs need, as values: who may pass, what filesystem, how long a socket's path gets."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

import conf
from conf.schema import Config

SOCKET_LIMIT = 107
"""Bytes of a Unix socket's path (sun_path without its closing NUL)."""
BELOW_SCRATCH = "/rollmill-4294967295/own-replica-9999-3f9ac2-xxxxxxxx/9999-xxxxxxxx/kernel/s-1"
"""The longest name of a socket below the scratch directory: user, worker, sandbox, one of a kernel's five."""

_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "ramfs", "overlay", "zfs", "squashfs"})


@dataclass(frozen=True, kw_only=True)
class Place:
    """One path that jobs need.

    Args:
        key: what names it: a key of the configuration, or "the interpreter", "the installation".
        path: where it is.
        way_out: what to do if it is wrong.
        uid: whose jobs.
        blocked: the directory or file on the way that this user cannot pass or read; None: all are open.
        filesystem: type, with the mount point; "" where it is not known.
        local: whether that is a kind that one node alone sees.
        socket_bytes: length of the longest socket's path below it; 0 where there are none.
    """

    key: str
    path: Path
    way_out: str
    uid: int
    blocked: Path | None = None
    filesystem: str = ""
    local: bool = False
    socket_bytes: int = 0
    socket_limit: int = SOCKET_LIMIT


def places(config: Config, python: str = sys.executable, *, uid: int | None = None) -> list[Place]:
    """The places of a run's jobs as they are on this machine, for this user or another's id. Blocking."""
    uid = os.getuid() if uid is None else uid
    mounts = _mounts()
    run = "give a run_dir on the shared filesystem"
    own = "install rollmill on the shared filesystem, where the job's user can read it"
    wanted = [
        ("run_dir", _standing(config.run_path), run),
        ("store", _standing(config.store_path), "give a store on the shared filesystem"),
        ("the interpreter", Path(python), own),
        ("the installation", Path(conf.__file__).parent, own),
    ]
    if config.task.path:
        wanted.append(("task.path", Path(config.task.path), "move the data to the shared filesystem"))
    if config.fleet.name != "external" and config.fleet.model.startswith("/"):
        wanted.append(("fleet.model", Path(config.fleet.model), "move the model to the shared filesystem"))
    wanted += [
        ("import_path", Path(path), "move your packages to the shared filesystem") for path in config.import_path
    ]
    found = [_place(key, path, way_out, uid, mounts) for key, path, way_out in wanted]
    scratch = config.cluster.scratch
    if scratch:
        found.append(
            Place(
                key="cluster.scratch", path=Path(scratch), uid=uid, way_out="give a shorter directory",
                socket_bytes=len((scratch + BELOW_SCRATCH).encode()),
            )
        )  # fmt: skip
    return found


def _place(key: str, path: Path, way_out: str, uid: int, mounts: list[tuple[str, str]]) -> Place:
    mount, kind = _mount(path.resolve(), mounts)
    return Place(
        key=key, path=path, way_out=way_out, uid=uid, blocked=_blocked(path, uid),
        filesystem=f"{kind} ({mount})" if kind else "", local=kind in _LOCAL,
    )  # fmt: skip


def _standing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next((one for one in (path, *path.parents) if one.exists()), path)


def _blocked(path: Path, uid: int) -> Path | None:
    """The first thing on the way that the user cannot pass, also behind symbolic links."""
    if uid == 0:
        return None
    for chain in dict.fromkeys((path.absolute(), path.resolve())):
        for one in (*reversed(chain.parents), chain):
            try:
                found = one.stat()
            except OSError:
                return one
            if not _may(found, uid, execute=stat.S_ISDIR(found.st_mode)):
                return one
    return None


def _may(found: os.stat_result, uid: int, *, execute: bool) -> bool:
    bit = 1 if execute else 4
    if found.st_uid == uid:
        return bool(found.st_mode & bit << 6)
    groups = {os.getgid(), *os.getgroups()} if uid == os.getuid() else set()
    return bool(found.st_mode & bit << 3) if found.st_gid in groups else bool(found.st_mode & bit)


def _mounts() -> list[tuple[str, str]]:
    """(mount point, filesystem type) of everything mounted, innermost last."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        found.append((left.split()[4].replace("\\040", " "), right.split()[0]))
    return found


def _mount(path: Path, mounts: list[tuple[str, str]]) -> tuple[str, str]:
    best = ("", "")
    for point, kind in mounts:
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    return best
