"""Starts the embedded engine as a process of its own and ends it, for tests and benchmarks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.waiting import poll

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 30.0


@dataclass(frozen=True)
class EngineProcess:
    """A running engine: where it listens, its process, when it was started, and where it writes what it says."""

    url: str
    process: subprocess.Popen[bytes]
    started_at: float
    log: Path


def spawn(model: Path, port_file: Path, log: Path, *flags: str) -> subprocess.Popen[bytes]:
    """Start the command; the caller ends it."""
    command = [sys.executable, "-P", "-m", "stages.engine.main", "--model", str(model), "--port-file", str(port_file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as sink:
        return subprocess.Popen([*command, *flags], stdout=sink, stderr=sink, cwd=port_file.parent, env=environment)


@contextmanager
def running_engine(model: Path, scratch: Path, *flags: str) -> Iterator[EngineProcess]:
    """An engine that answers; ended by SIGTERM, and killed only if that does not end it.

    Args:
        model: model directory.
        scratch: an empty directory for the port file and the log.
        flags: more of the command line.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    port_file, log = scratch / "port", scratch / "engine.log"
    started_at = time.monotonic()
    process = spawn(model, port_file, log, *flags)
    try:
        poll(lambda: port_file.exists() or process.poll() is not None, "the engine's port", START_LIMIT_S, 0.005)
        if not port_file.exists():
            raise RuntimeError(f"the engine did not start: {log.read_text()}")
        yield EngineProcess(f"http://127.0.0.1:{port_file.read_text()}", process, started_at, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def metric(client: httpx.Client, name: str) -> float:
    """One value of /metrics."""
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(f"vllm:{name}{{"):
            return float(line.rpartition(" ")[2])
    raise KeyError(name)


def generate(client: httpx.Client, token_ids: list[int], **sampling: Any) -> dict[str, Any]:
    """POST /inference/v1/generate and the decoded answer; raises for a refusal."""
    body = {"token_ids": token_ids, "sampling_params": sampling}
    answer: dict[str, Any] = client.post("/inference/v1/generate", json=body).raise_for_status().json()
    return answer


def until(condition: Callable[[], bool], what: str, limit_s: float = 15.0) -> None:
    """Poll until the condition holds, and fail by name when it does not in time."""
    poll(condition, what, limit_s, 0.01)
