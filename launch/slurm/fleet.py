"""fleet=vllm on Slurm as command lines and environments: ports, devices of a replica, tensor parallelism over nodes.

Pure but for `hold_port`. Flags are vLLM 0.32's. A replica that spans nodes needs no Ray: vLLM's own multiprocessing
executor joins one process a node (`--nnodes`, `--node-rank`, `--master-addr`), of which the first serves and the others
are headless.

vLLM cannot publish a port that it chose itself, and a port that was free a moment ago may be another's by the time it
binds. It binds with SO_REUSEADDR before it loads anything, so its starter holds the port meanwhile: see `hold_port`.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from conf.schema import Config


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one fleet process is: replica `replica` (from 1), `rank` 0 serves, the others lend it their GPUs."""

    replica: int
    rank: int
    of: int


@dataclass(frozen=True, kw_only=True)
class Server:
    """How one process is started; `environment` is added to the step's own."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


def span(config: Config) -> int:
    """Nodes of one replica: more than one where the fleet has more nodes than replicas."""
    return max(1, config.fleet.nodes // config.fleet.replicas)


def part_of(config: Config, number: int) -> Part:
    """Which part of which replica the fleet's process of this number (from 1, in the order of nodes) is."""
    of = span(config)
    return Part(replica=(number - 1) // of + 1, rank=(number - 1) % of, of=of)


def devices(visible: str, local: int, config: Config) -> str:
    """The GPUs of the `local`-th replica of a node (from 0), of those that the step sees (CUDA_VISIBLE_DEVICES).

    Raises:
        ValueError: the step has too few.
    """
    each = math.ceil(config.fleet.gpus_per_replica / span(config))
    mine = [name for name in visible.split(",") if name][local * each : (local + 1) * each]
    if len(mine) < each:
        raise ValueError(f"replica {local} of this node needs {each} GPUs, and the step has {visible!r}")
    return ",".join(mine)


def vllm_server(
    config: Config,
    part: Part,
    *,
    python: str,
    model: str,
    host: str,
    port: int,
    visible: str,
    api_key: str,
    master: str | None = None,
    master_port: int = 0,
) -> Server:
    """One vLLM process.

    Args:
        config: the run's.
        part: what it is.
        python: an interpreter that has vLLM.
        model: the directory that `fleet.model` stands for.
        host: this node's address in the network that the workers reach it by.
        port: held by `hold_port`; not used by a headless part.
        visible: its GPUs, as `devices` gives them; "" where it runs on CPUs.
        api_key: guards its routes; in the environment, since everybody can read a command line.
        master: address of the node of the replica's first part, where it spans nodes.
        master_port: where the parts of this replica meet, held on that node.
    """
    fleet, sampling = config.fleet, config.sampling
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    argv += ["--served-model-name", fleet.model, "--tensor-parallel-size", str(len(visible.split(",")) * part.of)]
    if not visible:
        argv += _ON_CPUS
    if part.of > 1:
        argv += ["--distributed-executor-backend", "mp", "--nnodes", str(part.of), "--node-rank", str(part.rank)]
        argv += ["--master-addr", master or host, "--master-port", str(master_port)]
    if part.rank:
        argv += ["--headless"]
    else:
        argv += ["--host", host, "--port", str(port), "--enable-scale-out", "--enable-prompt-tokens-details"]
        argv += ["--logprobs-mode", f"{sampling.logprobs}_logprobs", "--middleware", "rollmill_gate.Gate"]
    environment = {
        "CUDA_VISIBLE_DEVICES": visible,
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(fleet.cpus_per_task),
        "PYTHONPATH": str(GATE),
        "VLLM_API_KEY": api_key,
        "VLLM_HOST_IP": host,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        **({} if visible else _CPU_ENVIRONMENT),
    }
    return Server(argv=(*argv, *fleet.extra_args), environment=environment)


GATE: Final = Path(__file__).parents[1] / "gate"
"""The directory of the module that guards vLLM's routes, and of nothing else."""

_ON_CPUS: Final = ["--enforce-eager", "--dtype", "float32", "--block-size", "32"]
"""Blocks of 128 tokens, the default on CPUs, would keep short prompts out of the prefix cache."""

_CPU_ENVIRONMENT: Final = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def hold_port(host: str) -> socket.socket:
    """A bound socket that keeps a free port for a server that binds with SO_REUSEADDR too.

    It never listens, so that the server may; nobody is given the port by asking for any free one. Who asks for this
    very port could still have it, so look whose it is before anything secret is sent there: see `listener_uid`.
    Keep it open until the server has ended.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def listener_uid(port: int) -> int | None:
    """The user of whoever listens on this TCP port of this machine, as the kernel says; None while nobody does."""
    uids = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                uids.add(int(fields[7]))
    return min(uids, key=lambda uid: uid == os.getuid()) if uids else None


_LISTENING: Final = "0A"


def master_of(hosts: Sequence[str], part: Part) -> str:
    """The host of the first part of a replica, among the fleet's nodes in their order."""
    return hosts[(part.replica - 1) * part.of]
