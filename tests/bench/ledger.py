"""What the ledger carries: acknowledged events a second, reopening after a kill, and rollouts over real HTTP."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages import beacon
from stages.journal.history import read_events
from stages.layout import RunLayout
from stages.ledger import events
from tests.bench.report import emit
from tests.support.waiting import poll

MILL, CROWD = "tests.support.ledger_mill", "tests.support.ledger_crowd"
DEADLINE_S = 900


def command(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


@contextlib.contextmanager
def killed_after(arguments: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that gets SIGKILL at the end of the block."""
    with subprocess.Popen(arguments, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def acknowledged(directory: Path, seconds: int, errors: list[str]) -> dict[str, float]:
    """Kill a router in full flight: its rate, once all that it acknowledged is found in the journal, in order."""
    crcs: list[int] = []
    rate: dict[str, float] = {}
    with killed_after(command(MILL, "acked", directory, seconds), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        after = 0
        for line in process.stdout:
            if line.startswith(b"rate "):
                rate = json.loads(line[5:])
            elif line.endswith(b"\n"):
                crcs.append(int(line, 16))
                after += bool(rate)
            if after > 20_000:
                process.kill()
    journaled = (zlib.crc32(events.encode(event)) for event in read_events(RunLayout(directory)))
    missing = sum(crc not in journaled for crc in crcs)  # `in` moves on in the journal: order counts too
    if missing or not crcs:
        errors.append(f"{missing} of {len(crcs)} acknowledged events are not in the journal after kill -9")
    return rate


def reopened(directory: Path, rollouts: int, tail: int, errors: list[str]) -> dict[str, float]:
    """Open a run of so many finished rollouts whose router was killed `tail` events after its last snapshot."""
    subprocess.run(command(MILL, "fill", directory, rollouts), check=True, timeout=DEADLINE_S)
    with killed_after(command(MILL, "tail", directory, tail), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
    answer = subprocess.run(
        command(MILL, "reopen", directory), check=True, timeout=DEADLINE_S, stdout=subprocess.PIPE
    ).stdout
    found = json.loads(answer)
    if found["replayed"] < tail or found["completed"] < rollouts:
        errors.append(f"reopen: {found} is not {rollouts} rollouts and {tail} events after the snapshot")
    if found["accepted"] != found["completed"] + found["open"]:
        errors.append(f"reopen: rollouts are missing: {found}")
    return {
        "reopen_1m_s": found["reopen_s"],
        "reopen_rss_mib": found["rss_mib"],
        "reopen_events": found["replayed"],
        "reopen_rollouts": found["completed"],
    }


def over_http(directory: Path, rollouts: int) -> dict[str, float]:
    """Rollouts a second through three stages, and the router's CPU for each."""
    with killed_after(command(CROWD, "router", directory)):
        poll(lambda: beacon.read(RunLayout(directory)), "the router publishes itself", 30, 0.05)
        answer = subprocess.run(
            command(CROWD, "workers", directory, rollouts), check=True, timeout=DEADLINE_S, stdout=subprocess.PIPE
        ).stdout
    result: dict[str, float] = json.loads(answer)
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--part", choices=["acked", "reopen", "http"], action="append", help="only these parts")
    given = parser.parse_args(arguments)
    parts = given.part or ["acked", "reopen", "http"]
    results: dict[str, float] = {}
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        if "acked" in parts:
            results |= acknowledged(root / "acked", 1 if given.quick else 10, errors)
        if "reopen" in parts:
            sizes = (4_000, 2_000) if given.quick else (1_000_000, 200_000)
            results |= reopened(root / "reopen", *sizes, errors)
        if "http" in parts:
            results |= over_http(root / "http", 256 if given.quick else 10_000)
    return emit("ledger", results, errors=errors, as_json=given.json)


if __name__ == "__main__":
    raise SystemExit(main())
