"""The processes of a run as /proc shows them: by the mark in their environment, by kind, and whether they live."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.schedule import Kind

MARK = "ROLLMILL_TEST_MARK"


@dataclass(frozen=True)
class Process:
    """One process: `started` tells it from another that gets its pid later."""

    pid: int
    started: str
    command: tuple[str, ...]

    def send(self, number: int) -> bool:
        """Send a signal, 0 for none; False where the process is gone."""
        if _started(self.pid) != self.started:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def of_kind(supervisor: int, kind: Kind) -> list[Process]:
    """The supervisor itself, or its processes of a kind, from the moment they are started."""
    if kind == "supervisor":
        return [process for process in [_read(supervisor)] if process is not None]
    children = _children(supervisor)
    mine = [*children, *(forked for child in children for forked in _children(child))]
    found = [process for child in mine if (process := _read(child)) is not None]
    return [process for process in found if "launch.process" in process.command and kind in process.command]


def _children(pid: int) -> list[int]:
    """Those that its main thread has started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def marked(mark: str, run_dir: Path) -> list[Process]:
    """Everything that a run has started and that lives: its mark is inherited, its directory is in command lines."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            environment = Path(f"/proc/{entry}/environ").read_bytes()
            process = _read(int(entry))
            if process is None:
                continue
            mine = f"{MARK}={mark}".encode() in environment.split(b"\0")
            if mine or any(str(run_dir.parent) in word for word in process.command):
                found.append(process)
    return found


def _read(pid: int) -> Process | None:
    """None for one that has ended, a zombie too."""
    started = _started(pid)
    if started is None:
        return None
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(pid, started, tuple(command))


def _started(pid: int) -> str | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]
