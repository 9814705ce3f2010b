"""What killed processes leave in a run directory and its store: temporary files, and members that are not there."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from stages import members, sharedfs
from stages.identity import here
from stages.layout import RunLayout, StoreLayout


def sweep(layout: RunLayout, store: StoreLayout) -> int:
    """Remove temporary files and member files of this node's dead processes; returns how many there were.

    Only for who knows that every process of this node's name is in this PID namespace: the supervisor of a local run.
    """
    removed = 0
    for directory in (*layout.directories, *store.directories):
        with contextlib.suppress(FileNotFoundError):
            for name in sharedfs.list_dir(directory):
                if _is_dead_temp(name):
                    sharedfs.unlink(directory / name)
                    removed += 1
    for name in members.names(layout):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            member = msgspec.json.decode(sharedfs.read_bytes(layout.member(name)), type=members.Member)
            if member.node == here().node and not _lives(member.pid):
                sharedfs.unlink(layout.member(name))
                removed += 1
    return removed


def _is_dead_temp(name: str) -> bool:
    """Whether this is a temporary name as sharedfs gives them, of a process of this node that has ended."""
    parts = name.split(".")
    if not name.startswith(".") or len(parts) < 7 or parts[-1] != "tmp" or not parts[-4].isdecimal():
        return False
    return f".{here().node}.{parts[-4]}." in name and not _lives(int(parts[-4]))


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
