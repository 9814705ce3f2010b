"""Whether a control group (version 2) is delegated to this user, so that the kernel itself can hold limits."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

WANTED: Final = ("cpu", "memory", "pids")


def own_group(memberships: str, mounts: str) -> Path | None:
    """This process's directory in the version 2 hierarchy; None where there is none. Pure.

    Args:
        memberships: text of /proc/self/cgroup.
        mounts: text of /proc/self/mounts.
    """
    path = next((line[3:] for line in memberships.splitlines() if line.startswith("0::/")), None)
    points = [line.split(" ")[1] for line in mounts.splitlines() if line.split(" ")[2:3] == ["cgroup2"]]
    if path is None or not points:
        return None
    return Path(points[-1]) / path.lstrip("/")


def delegation(group: Path | None) -> tuple[bool, str]:
    """Whether limits of `WANTED` kinds could be set on groups below, and what was found. Makes and removes one."""
    if group is None:
        return False, "no version 2 hierarchy is mounted"
    try:
        controllers = set((group / "cgroup.controllers").read_text().split())
    except OSError as error:
        return False, f"{group}: {error.strerror}"
    missing = [name for name in WANTED if name not in controllers]
    if missing:
        return False, f"{group} has no controller {', '.join(missing)}"
    if not os.access(group / "cgroup.subtree_control", os.W_OK):
        return False, f"{group} belongs to somebody else"
    tried = group / f"rollmill-probe-{os.getpid()}"
    try:
        tried.mkdir()
    except OSError as error:
        return False, f"{group}: no group can be made below it: {error.strerror}"
    with suppress(OSError):
        tried.rmdir()
    return True, str(group)
