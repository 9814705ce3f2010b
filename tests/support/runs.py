"""Real runs by the real command, and what their files say afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stages.journal.history import read_events
from stages.layout import RunLayout
from stages.ledger.effects import Publish
from stages.ledger.events import Leased
from stages.ledger.machine import Ledger
from tests.support.waiting import poll as poll

REPOSITORY = Path(__file__).parents[2]


def command(run_dir: Path, *overrides: str) -> list[str]:
    """The command line of a demo-like run; the store lies beside the run directory."""
    return [sys.executable, "-P", "-m", "launch", "experiment=demo", f"run_dir={run_dir}", *overrides]


def run(run_dir: Path, *overrides: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    return subprocess.run(
        command(run_dir, *overrides), cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def verb(name: str, run_dir: Path, *options: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """`rollmill NAME RUN_DIR`."""
    words = [sys.executable, "-P", "-m", "launch", name, str(run_dir), *options]
    return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s, check=False)


@contextmanager
def running(run_dir: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """A run in the background; ended at the latest when the block ends."""
    process = subprocess.Popen(
        command(run_dir, *overrides), cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate()


def index(run_dir: Path) -> list[dict[str, Any]]:
    """Index lines by the reader's rule, written again here in its simplest form: higher epochs cut lower ones."""
    lines: dict[int, dict[str, Any]] = {}
    for path in sorted((run_dir / "index").glob("*.jsonl")):
        text = path.read_bytes().split(b"\n")[:-1]
        if not text:
            continue  # its writer died before the header was whole: it is nobody's
        header = json.loads(text[0])
        lines = {seq: line for seq, line in lines.items() if seq <= header["after_seq"]}
        for line in map(json.loads, text[1:]):
            lines.setdefault(line["seq"], line)
    return [lines[seq] for seq in sorted(lines)]


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Index lines of rollouts."""
    return [line for line in index(run_dir) if line["type"] == "rows"]


def replayed(run_dir: Path) -> Ledger:
    """The ledger that the journal gives."""
    ledger = Ledger()
    for event in read_events(RunLayout(run_dir)):
        ledger.apply(event)
    return ledger


def summary(run_dir: Path) -> dict[str, Any]:
    """report/summary.json."""
    result: dict[str, Any] = json.loads((run_dir / "report" / "summary.json").read_text())
    return result


def members(run_dir: Path) -> list[dict[str, Any]]:
    """Live processes as members/ says."""
    found = []
    for path in (run_dir / "members").glob("*.json"):
        try:
            found.append(json.loads(path.read_text()))
        except FileNotFoundError:
            continue
    return found


@dataclass
class Idle:
    """Slot-seconds of a stage: offered while work of it was queued, and left unused meanwhile."""

    offered_s: float = 0.0
    idle_s: float = 0.0


def idle_slots(run_dir: Path, stage: str, slots: int) -> Idle:
    """Replays the journal and adds up the time in which the stage had work queued and slots free."""
    ledger, idle, before, free, queued = Ledger(), Idle(), 0.0, 0, 0
    begun = False
    for event in read_events(RunLayout(run_dir)):
        if begun and queued:
            idle.offered_s += slots * (event.t - before)
            idle.idle_s += min(free, queued) * (event.t - before)
        ledger.apply(event)
        begun = begun or (isinstance(event, Leased) and event.stage == stage)
        leased = sum(lease.stage == stage for lease in ledger.state.leases.values())
        before, free, queued = event.t, slots - leased, len(ledger.queues.by_stage[stage])
    return idle


def exactly_once(run_dir: Path, expected: int) -> None:
    """Every accepted rollout has one line, every group one, and the counts add up."""
    seen = [row["rollout_id"] for row in rows(run_dir)]
    assert len(seen) == len(set(seen)) == expected
    ledger = replayed(run_dir)
    counts = ledger.state.counts
    assert (counts.accepted, len(ledger.state.rollouts)) == (expected, 0)
    assert counts.completed + counts.failed + counts.cancelled == expected
    groups = [line for line in index(run_dir) if line["type"] == "group"]
    assert sorted(r for line in groups for r in line["rollout_ids"]) == sorted(seen)


def alive(pids: Sequence[int]) -> list[int]:
    """Those that still run (zombies do not)."""
    living = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            living.append(pid)
    return living


def published(run_dir: Path) -> list[dict[str, Any]]:
    """The index lines that the journal, replayed, publishes."""
    ledger, lines = Ledger(), list[dict[str, Any]]()
    for event in read_events(RunLayout(run_dir)):
        _, effects = ledger.apply(event)
        lines += [msgspec.to_builtins(effect.line) for effect in effects if isinstance(effect, Publish)]
    return lines
