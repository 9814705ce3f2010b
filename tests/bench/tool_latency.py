"""How long one shell command takes: round trips alone, beside others, and many shells on one event loop."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from conf.components import SandboxBounds
from sandbox.apptainer import ApptainerBackend
from sandbox.bubblewrap import BubblewrapBackend
from sandbox.errors import SandboxError
from sandbox.limits import Bounds
from sandbox.none import NoneBackend
from sandbox.protocols import Sandbox, SandboxBackend, SandboxSpec
from stages.web import run
from tests.bench.report import emit
from tests.bench.shells import terminals
from tests.bench.shells.floor import Floor

BOUNDS = Bounds(**dataclasses.asdict(SandboxBounds()))
"""What workers pass by default: the watchdog's looks and the kernel's limits belong to the figures."""
COMMANDS = {"true": "true", "echo": 'echo "$KEPT" "${PWD##*/}" "$(( ${#KEPT} ))"; keep', "ls": "ls /etc"}
STATE = "mkdir -p here && cd here && export KEPT=yes && keep() { echo kept; }"
SETTLED_S = 8.0
"""After which what spins yields."""
KEPT = "yes here 3\nkept\n"
"""What the command "echo" answers: directory, exported variable and function are still those of STATE."""


def quantile(times_s: Sequence[float], share: float) -> float:
    """In milliseconds."""
    ordered = sorted(times_s)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def timed(sandbox: Sandbox, command: str, rounds: int, expected: str | None = None) -> list[float]:
    """Seconds of each round trip; the answer is checked where it is known."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        result = await sandbox.shell.run(command)
        times.append(time.perf_counter() - started)
        if result.exit_code != 0 or (expected is not None and result.output != expected):
            raise AssertionError(f"{command!r} gave {result}")
    return times


async def alone(backend: SandboxBackend, rounds: int) -> dict[str, float]:
    """Latencies of one shell with nothing beside it."""
    found: dict[str, float] = {}
    async with backend.create(SandboxSpec()) as sandbox:
        await sandbox.shell.run(STATE)
        await timed(sandbox, "true", 50)
        for name, command in COMMANDS.items():
            times = await timed(sandbox, command, rounds, KEPT if name == "echo" else None)
            found |= {f"{backend.name}_{name}_p50_ms": quantile(times, 0.5)}
            found |= {f"{backend.name}_{name}_p95_ms": quantile(times, 0.95)}
            if name == "true":
                found[f"{backend.name}_true_p99_ms"] = quantile(times, 0.99)
    return found


async def loaded(backend: SandboxBackend, floor: Floor, shells: int, rounds: int) -> dict[str, float]:
    """One shell beside others: that each run a builtin every 50 ms, that sleep a second, and that spin."""
    sandboxes = [backend.create(SandboxSpec()) for _ in range(shells + 1)]
    first, others = sandboxes[0], sandboxes[1:]
    ended = asyncio.Event()

    async def tick(sandbox: Sandbox) -> None:
        while not ended.is_set():
            await sandbox.shell.run("true")
            await asyncio.sleep(0.05)

    found: dict[str, float] = {}
    try:
        await started_together(sandboxes)
        async with asyncio.TaskGroup() as group:
            for one in others:
                group.create_task(tick(one))
            ours = await timed(first, "true", rounds)
            least = await floor.times(rounds)
            ended.set()
        found |= {f"{backend.name}_true_loaded_p99_ms": quantile(ours, 0.99)}
        found |= {f"{backend.name}_loaded_floor_p99_ms": quantile(least, 0.99)}
        started = time.perf_counter()
        await asyncio.gather(*(one.shell.run("sleep 1") for one in others))
        found[f"{backend.name}_{shells}_sleep1_s"] = time.perf_counter() - started
        await asyncio.gather(*(one.shell.run("while :; do :; done &") for one in others))
        await asyncio.sleep(SETTLED_S)
        ours, least = [], []
        for _ in range(5):  # in turns: what else this machine does is met by both
            least += await floor.times(rounds // 5)
            ours += await timed(first, "true", rounds // 5)
        found |= {f"{backend.name}_true_spinning_p99_ms": quantile(ours, 0.99)}
        found |= {f"{backend.name}_spinning_floor_p99_ms": quantile(least, 0.99)}
    finally:
        await asyncio.gather(*(one.stop() for one in sandboxes))
    return found


async def beside_strangers(floor: Floor, shells: int, rounds: int) -> float:
    """The floor's p99 in milliseconds beside spinning shells that are nobody's sandboxes."""
    spinning = [
        await asyncio.create_subprocess_exec("bash", "-c", "while :; do :; done", start_new_session=True)
        for _ in range(shells)
    ]
    try:
        await asyncio.sleep(SETTLED_S)
        return quantile(await floor.times(rounds), 0.99)
    finally:
        for one in spinning:
            one.kill()
        await asyncio.gather(*(one.wait() for one in spinning))


async def started_together(sandboxes: Sequence[Sandbox]) -> None:
    """All of them, sixteen at once."""
    for begin in range(0, len(sandboxes), 16):
        await asyncio.gather(*(one.start() for one in sandboxes[begin : begin + 16]))


async def together(backend: SandboxBackend, shells: int, rounds: int) -> float:
    """Builtins a second of many shells on one event loop."""
    sandboxes = [backend.create(SandboxSpec()) for _ in range(shells)]
    try:
        await started_together(sandboxes)
        started = time.perf_counter()
        await asyncio.gather(*(timed(one, "true", rounds) for one in sandboxes))
        return shells * rounds / (time.perf_counter() - started)
    finally:
        await asyncio.gather(*(one.stop() for one in sandboxes))


async def python_tool(backend: SandboxBackend, cells: int) -> dict[str, float]:
    """A worker's first kernel, from the call on a sandbox that was never used to its answer, and cells in it."""
    async with backend.create(SandboxSpec()) as sandbox:
        started = time.perf_counter()
        await sandbox.python.run("kept = 41")
        ready_s = time.perf_counter() - started
        times = []
        for _ in range(cells):
            started = time.perf_counter()
            answer = await sandbox.python.run("1+1")
            times.append(time.perf_counter() - started)
            if answer.text != "2\n":
                raise AssertionError(f"1+1 gave {answer}")
        if (await sandbox.python.run("kept + 1")).text != "42\n":
            raise AssertionError("a variable was lost")
    return {f"{backend.name}_python_ready_s": ready_s, f"{backend.name}_python_cell_p50_ms": quantile(times, 0.5)}


async def of_backend(backend: SandboxBackend, floor: Floor, rounds: int, shells: int) -> dict[str, float]:
    """All figures of one backend."""
    found = await python_tool(backend, 50)  # first: it is the worker's first kernel that is timed
    found |= await alone(backend, rounds)
    if backend.name != "none":
        found |= await loaded(backend, floor, 32, rounds)
    if backend.name == "bubblewrap":
        found[f"shells_{shells}_commands_per_s"] = await together(backend, shells, 40)
        if (least := await floor.together(40, shells)) is not None:
            found[f"shells_{shells}_floor_per_s"] = least
    return found


async def measure(scratch: Path, quick: bool) -> tuple[dict[str, float], dict[str, dict[str, float]], list[str]]:
    """All figures, those of others, and what could not be measured."""
    rounds, shells = (100, 32) if quick else (500, 256)
    floor = Floor(scratch)
    await floor.build()
    least = await floor.times(rounds)
    results = {"floor_p50_ms": quantile(least, 0.5), "floor_p99_ms": quantile(least, 0.99), "floor_in_c": floor.in_c}
    results["strangers_spinning_floor_p99_ms"] = await beside_strangers(floor, 32, rounds)
    errors: list[str] = []
    backends = [made(scratch, BOUNDS) for made in (BubblewrapBackend, ApptainerBackend, NoneBackend)]
    for backend in backends:
        async with backend:
            try:
                await backend.probe()
                results |= await of_backend(backend, floor, rounds, shells)
            except* (SandboxError, AssertionError) as group:
                errors += [f"{backend.name}: {error}" for error in group.exceptions]
    isolating = [one.name for one in backends if f"{one.name}_python_ready_s" in results and one.name != "none"]
    if isolating:  # the slower one stands for both
        for key in ("python_ready_s", "python_cell_p50_ms"):
            results[key] = max(results[f"{name}_{key}"] for name in isolating)
    if sleeping := [value for key, value in results.items() if key.endswith("_sleep1_s")]:
        results["shells_32_sleep1_s"] = max(sleeping)
    peers = {}
    for name, peer in terminals.installed().items():
        try:
            spent = await terminals.times(peer, rounds // 5)
            peers[name] = {"true_p50_ms": quantile(spent, 0.5), "true_p95_ms": quantile(spent, 0.95)}
        except Exception as error:  # noqa: BLE001 - of others: what they raise is not known, and no fault of ours
            sys.stderr.write(f"{name} was not measured: {type(error).__name__}: {str(error)[:100]}\n")
    return results, peers, errors


def compared(results: Mapping[str, float], peers: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Ours over the floor, and the peers' over ours, of the same run."""
    pairs = {}
    for name in ("bubblewrap", "apptainer"):
        if f"{name}_true_p50_ms" not in results:
            continue
        pairs[f"{name}_true_x_floor"] = (results[f"{name}_true_p50_ms"], results["floor_p50_ms"])
        if f"{name}_true_spinning_p99_ms" in results:
            ours, least = results[f"{name}_true_spinning_p99_ms"], results[f"{name}_spinning_floor_p99_ms"]
            pairs[f"{name}_spinning_p99_x_floor"] = (ours, least)
        for peer, figures in peers.items():
            pairs[f"{peer}_x_{name}"] = (figures["true_p50_ms"], results[f"{name}_true_p50_ms"])
    return {key: above / max(below, 1e-6) for key, (above, below) in pairs.items()}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shells")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollmill-bench-") as scratch:
        results, peers, errors = run(measure(Path(scratch), arguments.quick))
    return emit(
        "tool_latency", results, peers=peers, ratios=compared(results, peers), errors=errors, as_json=arguments.json
    )


if __name__ == "__main__":
    sys.exit(main())
