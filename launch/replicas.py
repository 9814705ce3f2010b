"""fleet=vllm: one vLLM server as a replica of the run: started, stamped, registered, watched, ended.

The server is a process group of its own beside ours. It gets the run's engine key by its environment, and a gate that
demands it on every route (`launch/gate`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from conf.schema import Config
from launch import wiring
from launch.errors import LaunchError
from launch.kinds import die_with_parent
from launch.slurm.fleet import devices, hold_port, listener_uid, part_of, vllm_server
from stages.engine_control import EngineControl, EngineControlError

VLLM_SEQUENCES: Final = 256
"""Requests that vLLM runs at once where no flag says otherwise: what the router takes for a replica's capacity."""
POLL_S: Final = 0.5
END_S: Final = 5.0
"""Below the supervisor's patience with a replica."""
_DEVICE: Final = re.compile(r"nvidia(\d+)$")


def vllm_python(config: Config) -> str:
    """The interpreter that has vLLM."""
    if config.fleet.python is not None:
        return config.fleet.python
    beside = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
    return str(beside) if beside.exists() else sys.executable


def visible_devices(config: Config, number: int, *, dev: Path = Path("/dev")) -> str:
    """The GPUs of the number-th replica (from 1) of this node; "" where it runs on CPUs.

    Outside of a job nobody has chosen: all that the machine has are shared out. A machine without any serves on CPUs.

    Raises:
        LaunchError: fewer than the replicas need.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        visible = ",".join(sorted((m[1] for path in dev.glob("nvidia*") if (m := _DEVICE.match(path.name))), key=int))
    if not config.fleet.gpus_per_replica or (not visible and config.placement.name == "local"):
        return ""
    try:
        return devices(visible, number - 1, config)
    except ValueError as error:
        raise LaunchError(f"fleet.gpus_per_replica={config.fleet.gpus_per_replica}: {error}") from error


def _local_rank(config: Config, number: int) -> int:
    """Which of this node's replicas this is, from 1: each node of a step has as many as its share says."""
    if config.placement.name == "local":
        return number
    per_node = -(-config.fleet.replicas // max(1, min(config.fleet.nodes, config.fleet.replicas)))
    return (number - 1) % per_node + 1


@contextlib.asynccontextmanager
async def vllm_replica(
    config: Config, number: int, *, host: str, api_key: str, version: int = 0
) -> AsyncIterator[Vllm]:
    """A vLLM server that answers and whose answers carry a version; ended with all its processes.

    Args:
        config: the run's.
        number: which replica, from 1.
        host: the address that it listens on.
        api_key: guards it.
        version: the policy version that its weights are.

    Raises:
        LaunchError: it cannot start, or did not serve within `fleet.start_s`; quotes what it said last.
    """
    part = part_of(config, number)
    if part.of > 1:
        raise LaunchError(
            f"fleet.nodes={config.fleet.nodes} with fleet.replicas={config.fleet.replicas}: a replica over several "
            "nodes cannot be started yet; set fleet.nodes to at most fleet.replicas"
        )
    with hold_port(host) as held:
        port = held.getsockname()[1]
        server = vllm_server(
            config, part, python=vllm_python(config), model=str(wiring.model_dir(config)), host=host, port=port,
            visible=visible_devices(config, _local_rank(config, number)), api_key=api_key,
        )  # fmt: skip
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        try:
            process = await asyncio.create_subprocess_exec(
                *server.argv, env={**environment, **server.environment}, stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True, preexec_fn=functools.partial(die_with_parent, parent=os.getpid()),
            )  # fmt: skip
        except OSError as error:
            raise LaunchError(f"fleet.python: {server.argv[0]} does not run ({error.strerror})") from error
        try:
            async with EngineControl(api_key=api_key) as control:
                await _until_healthy(process, control, url, config.fleet.start_s)
                await _stamp(control, url, version)
            yield Vllm(url, process)
        finally:
            await asyncio.shield(_end(process))


class Vllm:
    """A running server."""

    def __init__(self, url: str, process: asyncio.subprocess.Process) -> None:
        self.url, self._process = url, process

    async def broken(self) -> LaunchError:
        """Returns when the server has ended by itself."""
        return LaunchError(f"the vLLM server at {self.url} ended with code {await self._process.wait()}; see this log")


async def _until_healthy(process: asyncio.subprocess.Process, control: EngineControl, url: str, start_s: float) -> None:
    began = time.monotonic()
    port = int(url.rpartition(":")[2])
    while True:
        owner = await asyncio.to_thread(listener_uid, port)
        if owner not in (None, os.getuid()):
            raise LaunchError(f"port {port}: user {owner} listens there in place of vLLM; nothing was sent to it")
        if owner is not None and await control.healthy(url):
            return
        if process.returncode is not None:
            raise LaunchError(
                f"vLLM ended with code {process.returncode} before it served; this replica's log has its words "
                "(is vLLM in the environment of fleet.python?)"
            )
        if time.monotonic() - began > start_s:
            raise LaunchError(f"vLLM at {url} did not serve within fleet.start_s={start_s:g} s; see this replica's log")
        await asyncio.sleep(POLL_S)


async def _stamp(control: EngineControl, url: str, version: int) -> None:
    """Versions are integers from the first token on; an engine that has none keeps none, and rows say null."""
    try:
        await control.stamp(url, version)
    except EngineControlError as error:
        if error.detail.get("status") != 404:
            raise LaunchError(f"vLLM at {url} took no version: {error}") from error


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the server and every process that it started: its engine core outlives a server that is killed."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
