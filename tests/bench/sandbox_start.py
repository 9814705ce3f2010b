"""How long a sandbox takes to start and to stop, what one weighs, and what a thousand cycles leave behind."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sandbox.apptainer import ApptainerBackend
from sandbox.bubblewrap import BubblewrapBackend
from sandbox.errors import SandboxError
from sandbox.protocols import SandboxBackend, SandboxSpec
from sandbox.pty_backend import PtyBackend
from tests.bench.report import emit
from tests.bench.tool_latency import BOUNDS, quantile
from tests.support.images import cached_root

BACKENDS: tuple[type[PtyBackend], ...] = (BubblewrapBackend, ApptainerBackend)
AT_ONCE = 4
"""Starts that are under way together where many are wanted."""


def layers(place: Path) -> tuple[str, ...]:
    """Two unpacked layers of a few files, as INIT leaves them."""
    for number in (1, 2):
        for name in range(20):
            path = place / f"layer{number}/work/project/file{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"print({number}, {name})\n")
    return str(place / "layer1"), str(place / "layer2")


async def timed(backend: SandboxBackend, spec: SandboxSpec, rounds: int) -> dict[str, float]:
    """Starts and stops one after another: directory, mounts, pty and first prompt; the first of the worker apart."""
    starts, stops = [], []
    for _ in range(rounds + 1):
        before = time.perf_counter()
        sandbox = backend.create(spec)
        await sandbox.start()
        ready = time.perf_counter()
        await sandbox.shell.run("echo changed > /work/file")
        leaving = time.perf_counter()
        await sandbox.stop()
        stops.append(time.perf_counter() - leaving)
        starts.append(ready - before)
    name = backend.name
    return {
        f"{name}_cold_ms": 1000 * starts[0], f"{name}_p50_ms": quantile(starts[1:], 0.5),
        f"{name}_p95_ms": quantile(starts[1:], 0.95), f"{name}_stop_p50_ms": quantile(stops[1:], 0.5),
    }  # fmt: skip


def bare_exec(image: Path, rounds: int) -> float:
    """p50 in ms of Apptainer's own start and end, with nothing asked of it but what an ordinary user gets."""
    times = []
    for _ in range(rounds + 1):
        before = time.perf_counter()
        subprocess.run(["apptainer", "exec", "--userns", str(image), "true"], check=True, capture_output=True)
        times.append(time.perf_counter() - before)
    return quantile(times[1:], 0.5)


def family(pid: int) -> set[int]:
    """All descendants of a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def proportional_kib(pids: set[int]) -> int:
    """Memory of processes, what they share with others counted by halves, thirds and so on."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return total


async def weight(backend: SandboxBackend, spec: SandboxSpec, count: int) -> float:
    """MiB of each of many sandboxes alive at once: their processes, and what worker and spawner grew by."""
    async with backend.create(spec) as first:
        await first.start()
        before = proportional_kib(family(os.getpid()) | {os.getpid()})
        sandboxes = [backend.create(spec) for _ in range(count)]
        try:
            for begin in range(0, count, AT_ONCE):
                await asyncio.gather(*(one.start() for one in sandboxes[begin : begin + AT_ONCE]))
            return (proportional_kib(family(os.getpid()) | {os.getpid()}) - before) / 1024 / count
        finally:
            await asyncio.gather(*(one.stop() for one in sandboxes))


def standing(scratch: Path) -> dict[str, int]:
    """What there is of this worker's now."""
    mounts = Path("/proc/self/mountinfo").read_text().count(str(scratch))
    for pid in family(os.getpid()):
        with contextlib.suppress(OSError):
            mounts += Path(f"/proc/{pid}/mountinfo").read_text().count(str(scratch))
    return {
        "processes": len(family(os.getpid())), "descriptors": len(os.listdir("/proc/self/fd")), "mounts": mounts,
        "directories": sum(len(directories) for _, directories, _ in os.walk(scratch)),
    }  # fmt: skip


async def cycles(backend: SandboxBackend, spec: SandboxSpec, count: int, scratch: Path) -> dict[str, int]:
    """What more there is after so many sandboxes, each with files, a job and a daemon, than there was before."""
    await backend.create(spec).stop()
    before = standing(scratch)
    for _ in range(0, count, AT_ONCE):
        sandboxes = [backend.create(spec) for _ in range(AT_ONCE)]
        await asyncio.gather(
            *(one.shell.run("mkdir -p a/b; touch a/b/c; sleep 99 & (setsid sleep 99 &)") for one in sandboxes)
        )
        await asyncio.gather(*(one.stop() for one in sandboxes))
    return {kind: number - before[kind] for kind, number in standing(scratch).items()}


async def measure(place: Path, quick: bool) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """All figures, ratios, and what could not be measured."""
    rounds, alive, turns = (10, 20, 24) if quick else (100, 200, 1000)
    results: dict[str, float] = {}
    ratios: dict[str, float] = {}
    errors: list[str] = []
    spec = SandboxSpec(layers=layers(place / "layers"))
    left = 0
    for kind in BACKENDS:
        scratch = place / kind.__name__
        async with kind(scratch, BOUNDS) as backend:
            try:
                results |= await timed(backend, spec, rounds)
                if backend.name == "apptainer":
                    bare = results["apptainer_bare_exec_p50_ms"] = await asyncio.to_thread(
                        bare_exec, cached_root(), rounds
                    )
                    ratios["apptainer_x_bare_exec"] = results["apptainer_p50_ms"] / bare
                else:
                    results["mib_each_200"] = await weight(backend, spec, alive)
                found = await cycles(backend, spec, turns, scratch)
                left += sum(max(0, number) for number in found.values())
                errors += [f"{backend.name}: {number} {what} left" for what, number in found.items() if number > 0]
            except SandboxError as error:
                errors.append(f"{backend.name}: {error}")
    results["leftovers"] = left
    return results, ratios, errors


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sandboxes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollmill-bench-") as place:
        results, ratios, errors = asyncio.run(measure(Path(place), arguments.quick))
    return emit("sandbox_start", results, ratios=ratios, errors=errors, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
