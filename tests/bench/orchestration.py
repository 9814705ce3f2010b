"""Whole runs on a scripted engine: rollouts a second, CPU and memory of everything but the engine, loop lag, faults.

Each rollout makes 4 model calls and 3 shell calls, durable and indexed: `rollmill` itself, as one would start it. Rates
and CPU are taken between the tenth and the ninety-fifth percent of the rollouts, so starting processes is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tests.bench.report import emit
from tests.support.waiting import poll

ROOT = Path(__file__).resolve().parents[2]
CALLS, LATENCY_S = 4, 0.05
LAG_PERIOD_S = 0.25
"""The router's own tick: its lag and a bare loop's are lateness of the same sleep."""
LIMIT_S = 900.0
TICKS = os.sysconf("SC_CLK_TCK")
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True)
class Case:
    """One run."""

    rollouts: int
    at_once: int
    sandbox: str = "none"
    latency_ms: float = 0.0
    errors: float = 0.0


@dataclass(frozen=True)
class Usage:
    """A look at a run: monotonic seconds, index rows, CPU seconds of all its processes and of its router, memory."""

    at: float
    rows: int
    cpu_s: float
    router_cpu_s: float
    rss_mib: float


def _processes(top: int) -> dict[int, list[str]]:
    """Fields of /proc/PID/stat, from the state on, of a process and its descendants."""
    stats: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stats[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
    found, more = {}, [top]
    while more:
        pid = more.pop()
        if pid in stats:
            found[pid] = stats[pid]
            more += [child for child, fields in stats.items() if int(fields[1]) == pid]
    return found


def _rows(run_dir: Path) -> int:
    return sum(path.read_bytes().count(b'"type":"rows"') for path in (run_dir / "index").glob("*.jsonl"))


def _look(top: int, run_dir: Path, router: int) -> Usage:
    processes = _processes(top)
    cpu = sum(sum(map(int, fields[11:15])) for fields in processes.values()) / TICKS
    routers = sum(map(int, processes[router][11:13])) / TICKS if router in processes else 0.0
    rss = sum(int(fields[21]) for fields in processes.values()) * PAGE_MIB
    return Usage(time.monotonic(), _rows(run_dir), cpu, routers, rss)


class _BareLoop:
    """Lateness of a thread that does nothing but sleep, on the same machine at the same time."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _BareLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        import asyncio

        async def beat() -> None:
            while not self._stop.is_set():
                started = time.monotonic()
                await asyncio.sleep(LAG_PERIOD_S)
                self.late_s.append(time.monotonic() - started - LAG_PERIOD_S)

        asyncio.run(beat())

    @property
    def p99_ms(self) -> float:
        ordered = sorted(self.late_s) or [0.0]
        return 1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def _router_lag_ms(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith('rollmill_event_loop_lag_seconds{quantile="0.99"}'):
                return 1000 * float(line.rpartition(" ")[2])
    raise RuntimeError("the router exports no loop lag")


def _worker_lag_ms(url: str, run_dir: Path) -> float:
    token = (run_dir / "secrets/trainer.token").read_text().strip()
    request = urllib.request.Request(f"{url}/v1/status", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        members = json.load(answer)["members"]
    return 1000 * max((member.get("loop_lag_s", 0.0) for member in members if member["kind"] == "run"), default=0.0)


def run_case(case: Case, scratch: Path) -> dict[str, float]:
    """One run to its end; its figures."""
    scratch.mkdir(parents=True)
    port_file, run_dir = scratch / "engine", scratch / "run"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    mock = [sys.executable, "-P", "-m", "tests.support.mock_engine", str(port_file),
            f"--latency-ms={case.latency_ms}", f"--errors={case.errors}"]  # fmt: skip
    group = 16
    with subprocess.Popen(mock, env=environment, cwd=scratch) as engine:
        try:
            poll(port_file.exists, "the mock engine", 60)
            command = [
                sys.executable, "-P", "-m", "launch", "task=arith", "agent=tools", "fleet=external",
                f"fleet.urls=[{port_file.read_text()}]", "fleet.model=tiny", f"sandbox={case.sandbox}",
                f"pools.run.slots={case.at_once}", "pools.eval.slots=16", f"task.limit={case.rollouts // group}",
                f"group_size={group}", f"run_dir={run_dir}",
            ]  # fmt: skip
            with (
                (scratch / "log").open("wb") as log,
                subprocess.Popen(command, env=environment, cwd=scratch, stdout=log, stderr=log) as top,
                _BareLoop() as bare,
            ):
                try:
                    figures = _measure(case, top, run_dir)
                    figures["bare_lag_p99_ms"] = bare.p99_ms
                    top.wait(LIMIT_S)
                finally:
                    top.terminate()
        finally:
            engine.kill()
    summary = json.loads((run_dir / "report/summary.json").read_text())
    figures["completed"] = summary["rollouts"]["completed"]
    return figures


def _measure(case: Case, top: subprocess.Popen[bytes], run_dir: Path) -> dict[str, float]:
    def reached(share: float) -> None:
        poll(lambda: top.poll() is not None or _rows(run_dir) >= share * case.rollouts, f"{share:.0%}", LIMIT_S, 0.1)

    reached(0.1)
    beacon = json.loads((run_dir / "router.json").read_text())
    first = _look(top.pid, run_dir, beacon["pid"])
    reached(0.9)
    last = _look(top.pid, run_dir, beacon["pid"])
    rollouts = max(1, last.rows - first.rows)
    try:
        lag_ms, worker_ms = _router_lag_ms(beacon["url"]), _worker_lag_ms(beacon["url"], run_dir)
    except OSError:
        lag_ms = worker_ms = float("nan")
    return {
        "rollouts_per_s": rollouts / (last.at - first.at),
        "cpu_s_per_1000": 1000 * (last.cpu_s - first.cpu_s) / rollouts,
        "router_cpu_ms": 1000 * (last.router_cpu_s - first.router_cpu_s) / rollouts,
        "rss_mib": last.rss_mib,
        "lag_p99_ms": lag_ms,
        "worker_lag_ms": worker_ms,
    }


def measure(scratch: Path, quick: bool, parts: list[str], errors: list[str]) -> dict[str, float]:
    """All figures of the contract."""
    small = 8 if quick else 1
    results: dict[str, float] = {}
    if "rate" in parts:
        found = run_case(Case(4096 // small, 64), scratch / "none")
        results |= {
            "rollouts_per_s_0ms": found["rollouts_per_s"],
            "cpu_s_per_1000": found["cpu_s_per_1000"],
            "router_cpu_ms_per_rollout": found["router_cpu_ms"],
        }
    if "bubblewrap" in parts:
        found = run_case(Case(1024 // small, 64, sandbox="bubblewrap"), scratch / "bwrap")
        results["rollouts_per_s_0ms_bubblewrap"] = found["rollouts_per_s"]
    if "ideal" in parts:
        found = run_case(Case(2048 // small, 32, latency_ms=1000 * LATENCY_S), scratch / "ideal")
        results["ideal_fraction_50ms"] = found["rollouts_per_s"] / (32 / (CALLS * LATENCY_S))
    if "lag" in parts:
        found = run_case(Case(8192 // small, 256), scratch / "lag")
        results |= {
            "loop_lag_p99_ms": found["lag_p99_ms"],
            "bare_loop_lag_p99_ms": found["bare_lag_p99_ms"],
            "worker_loop_lag_ms": found["worker_lag_ms"],
            "rss_mib": found["rss_mib"],
        }
    if "errors" in parts:
        rollouts = 304 if not quick else 64
        found = run_case(Case(rollouts, 64, errors=0.05), scratch / "errors")
        results["completed_with_5pct_errors"] = found["completed"] / rollouts
        if found["completed"] != rollouts:
            errors.append(f"{rollouts - found['completed']:.0f} of {rollouts} rollouts were lost to 5 % model errors")
    return results


PARTS = ["rate", "bubblewrap", "ideal", "lag", "errors"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--part", choices=PARTS, action="append", help="only these parts")
    given = parser.parse_args(arguments)
    errors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rollmill-bench-") as scratch:
        results = measure(Path(scratch), given.quick, given.part or PARTS, errors)
    return emit("orchestration", results, errors=errors, as_json=given.json)


if __name__ == "__main__":
    raise SystemExit(main())
