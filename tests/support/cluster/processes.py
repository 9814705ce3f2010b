"""The processes of a test cluster: who they are is read from /proc, and nothing is ever ended by its name alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.waiting import poll


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty when it is gone or is not ours to read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def running(pid: int) -> bool:
    """Whether the process still does anything: a zombie that nobody has reaped yet does not."""
    return _state(pid) not in ("", "Z", "X")


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def described(pid: int) -> str:
    """One line on a process for a failure's message: pid, state, parent, place in the kernel, job and command."""

    def read(what: str) -> str:
        try:
            return Path(f"/proc/{pid}/{what}").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            return "?"

    state, parent = ([*_stat(pid), "gone", "?"])[:2]
    job = environment(pid).get("SLURM_JOB_ID", "?")
    return f"{pid} {state} of {parent} in {read('wchan')}, job {job}: {read('cmdline')[:200]}"


def everybody() -> Iterator[int]:
    """All pids of this machine, now."""
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            yield int(entry.name)


def descendants(pids: Iterable[int]) -> set[int]:
    """The given processes and all that are below them."""
    children: dict[int, list[int]] = {}
    for pid in everybody():
        fields = _stat(pid)
        if fields:
            children.setdefault(int(fields[1]), []).append(pid)
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def of_cluster(conf: Path) -> dict[int, dict[str, str]]:
    """Processes that were started with this SLURM_CONF, with their environments."""
    found = {pid: environment(pid) for pid in everybody()}
    return {pid: env for pid, env in found.items() if env.get("SLURM_CONF") == str(conf) and running(pid)}


def of_jobs(conf: Path) -> set[int]:
    """Processes of this cluster's jobs, and all below them (a sandbox has an environment of its own)."""
    return descendants(pid for pid, env in of_cluster(conf).items() if "SLURM_JOB_ID" in env)


def step_daemons(logs: Iterable[Path]) -> set[int]:
    """Step daemons of the nodes that log there: each holds its log open, and from 24.11 on has no environment."""
    wanted = set(map(str, logs))
    return {
        pid for pid in everybody() if name(pid) == "slurmstepd" and running(pid) and not wanted.isdisjoint(_open(pid))
    }


def _open(pid: int) -> set[str]:
    try:
        return {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}
    except OSError:
        return set()


def kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Signal these processes; one that has gone meanwhile is as good."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def read_pid(path: Path, conf: Path) -> int | None:
    """The daemon's pid from its file, if that process lives and is this cluster's: pids are used again."""
    try:
        pid = int(path.read_text())
    except (OSError, ValueError):
        return None
    return pid if running(pid) and environment(pid).get("SLURM_CONF") == str(conf) else None


def stop(pid: int, patience_s: float) -> None:
    """End a daemon: by request, and by force when it does not follow in time."""
    kill([pid], signal.SIGTERM)
    try:
        poll(lambda: not running(pid), f"process {pid} ends", patience_s)
    except AssertionError:
        kill([pid])
        poll(lambda: not running(pid), f"process {pid} ends after SIGKILL", 10)
