"""How long one shell command takes: round trips alone, beside others, and many shells on one event loop."""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ptyprocess import PtyProcess

from sandbox.bubblewrap import BubblewrapBackend
from sandbox.errors import SandboxError
from sandbox.none import NoneBackend
from sandbox.protocols import Sandbox, SandboxBackend, SandboxSpec
from tests.bench.report import emit

COMMANDS = {"true": "true", "echo": 'echo "$KEPT" "${PWD##*/}" "$(( ${#KEPT} ))"; keep', "ls": "ls /etc"}
STATE = "mkdir -p here && cd here && export KEPT=yes && keep() { :; }"


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
            times = await timed(sandbox, command, rounds, "yes here 3\n" if name == "echo" else None)
            found |= {f"{backend.name}_{name}_p50_ms": quantile(times, 0.5)}
            found |= {f"{backend.name}_{name}_p95_ms": quantile(times, 0.95)}
            if name == "true":
                found[f"{backend.name}_true_p99_ms"] = quantile(times, 0.99)
    return found


async def beside(backend: SandboxBackend, shells: int, rounds: int) -> dict[str, float]:
    """p99 of one shell beside others that each run a builtin every 50 ms."""
    sandboxes = [backend.create(SandboxSpec()) for _ in range(shells + 1)]
    await asyncio.gather(*(one.start() for one in sandboxes))
    ended = asyncio.Event()

    async def tick(sandbox: Sandbox) -> None:
        while not ended.is_set():
            await sandbox.shell.run("true")
            await asyncio.sleep(0.05)

    try:
        async with asyncio.TaskGroup() as group:
            for one in sandboxes[1:]:
                group.create_task(tick(one))
            times = await timed(sandboxes[0], "true", rounds)
            ended.set()
        started = time.perf_counter()
        await asyncio.gather(*(one.shell.run("sleep 1") for one in sandboxes[1:]))
        slept = time.perf_counter() - started
    finally:
        await asyncio.gather(*(one.stop() for one in sandboxes))
    return {f"{backend.name}_true_loaded_p99_ms": quantile(times, 0.99), f"shells_{shells}_sleep1_s": slept}


async def together(backend: SandboxBackend, shells: int, rounds: int) -> dict[str, float]:
    """Builtins a second of many shells on one event loop."""
    sandboxes = [backend.create(SandboxSpec()) for _ in range(shells)]
    try:
        for begin in range(0, shells, 16):
            await asyncio.gather(*(one.start() for one in sandboxes[begin : begin + 16]))
        started = time.perf_counter()
        await asyncio.gather(*(timed(one, "true", rounds) for one in sandboxes))
        return {f"shells_{shells}_commands_per_s": shells * rounds / (time.perf_counter() - started)}
    finally:
        await asyncio.gather(*(one.stop() for one in sandboxes))


def floor(rounds: int) -> float:
    """p50 in milliseconds of a bash on a pty, read with blocking calls and a fixed marker: what Python alone allows."""
    child = PtyProcess.spawn(["bash", "--norc", "--noprofile", "--noediting", "-i"], echo=False, env={"PS1": ""})
    try:
        os.write(child.fd, b"echo ready\n")
        while b"ready" not in os.read(child.fd, 4096):
            pass
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            os.write(child.fd, b"true;printf '\\036'\n")
            while b"\x1e" not in os.read(child.fd, 4096):
                select.select([child.fd], [], [], 5.0)
            times.append(time.perf_counter() - started)
        return quantile(times, 0.5)
    finally:
        child.terminate(force=True)


async def measure(scratch: Path, quick: bool) -> tuple[dict[str, float], list[str]]:
    """All figures, and what could not be measured."""
    rounds, shells = (100, 32) if quick else (500, 256)
    results: dict[str, float] = {"floor_p50_ms": floor(rounds)}
    errors = []
    for backend in (BubblewrapBackend(scratch), NoneBackend(scratch)):
        async with backend:
            try:
                await backend.probe()
                results |= await alone(backend, rounds)
                if backend.name == "bubblewrap":
                    results |= await beside(backend, 32, rounds)
                    results |= await together(backend, shells, 20 if quick else 40)
            except (SandboxError, AssertionError) as error:
                errors.append(f"{backend.name}: {error}")
    return results, errors


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shells")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollmill-bench-") as scratch:
        results, errors = asyncio.run(measure(Path(scratch), arguments.quick))
    ratios = {}
    if "bubblewrap_true_p50_ms" in results:
        ratios["bubblewrap_true_x_floor"] = results["bubblewrap_true_p50_ms"] / results["floor_p50_ms"]
    return emit("tool_latency", results, ratios=ratios, errors=errors, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
