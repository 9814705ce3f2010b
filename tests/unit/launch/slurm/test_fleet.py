"""fleet=vllm on Slurm: command lines, devices, nodes of one replica, and ports that nobody takes meanwhile."""

from __future__ import annotations

import os
import shlex
import socket
from pathlib import Path

import pytest

from conf.schema import Config
from launch.slurm.checks import check
from launch.slurm.fleet import GATE, Part, Server, devices, hold_port, listener_uid, master_of, part_of, vllm_server
from launch.slurm.shapes import jobs_of
from tests.unit.launch.slurm.configs import make

GOLDEN = Path(__file__).parent / "golden" / "vllm.txt"
MODEL = "fleet.model=/shared/models/qwen"


def vllm(*overrides: str) -> Config:
    return make("fleet=vllm", "fleet.gpus_per_replica=0", MODEL, *overrides)


def text(server: Server) -> str:
    environment = [f"{key}={value}" for key, value in sorted(server.environment.items())]
    return shlex.join([*environment, *server.argv]).replace(str(GATE), "GATE")


def start(config: Config, number: int, visible: str) -> Server:
    part = part_of(config, number)
    return vllm_server(
        config, part, python="/shared/vllm/bin/python", model=config.fleet.model,
        host=f"10.0.0.{part.rank + 1}", port=40001,
        visible=visible, api_key="KEY",
        master=master_of(["10.0.0.1", "10.0.0.2"], part) if part.of > 1 else None, master_port=29500,
    )  # fmt: skip


def golden_text() -> str:
    one = vllm("fleet.gpus_per_replica=2", "fleet.replicas=2", "fleet.cpus_per_task=8")
    cpu = vllm("sampling.logprobs=raw")
    two = vllm("fleet.gpus_per_replica=16", "fleet.nodes=2")
    servers = {
        "second replica of a node": start(one, 2, devices("0,1,2,3", 1, one)),
        "on CPUs": start(cpu, 1, ""),
        "over two nodes, first": start(two, 1, devices("0,1,2,3,4,5,6,7", 0, two)),
        "over two nodes, second": start(two, 2, devices("0,1,2,3,4,5,6,7", 0, two)),
    }
    return "".join(f"# {name}\n{text(server)}\n" for name, server in servers.items())


def test_command_lines_are_their_golden_file() -> None:
    assert golden_text() == GOLDEN.read_text()


def test_the_key_is_on_no_command_line() -> None:
    server = start(vllm(), 1, "")
    assert "KEY" not in server.argv and server.environment["VLLM_API_KEY"] == "KEY"


def test_replicas_of_a_node_share_its_gpus_out_and_too_few_are_said() -> None:
    config = vllm("fleet.gpus_per_replica=2", "fleet.replicas=2")
    assert [devices("4,5,6,7", local, config) for local in (0, 1)] == ["4,5", "6,7"]
    assert devices("GPU-a,GPU-b", 0, config) == "GPU-a,GPU-b"
    with pytest.raises(ValueError, match="needs 2 GPUs, and the step has '4,5,6'"):
        devices("4,5,6", 1, config)
    assert devices("", 0, vllm()) == ""


def test_a_replica_over_nodes_asks_each_for_its_part() -> None:
    config = vllm("fleet.gpus_per_replica=16", "fleet.nodes=4", "fleet.replicas=2")
    fleet = jobs_of(config, "het")[0].components[-1]
    assert (fleet.nodes, fleet.gpus, fleet.kinds) == (4, 8, (("replica", 1),))
    assert [part_of(config, number) for number in (1, 2, 3, 4)] == [
        Part(replica=1, rank=0, of=2), Part(replica=1, rank=1, of=2),
        Part(replica=2, rank=0, of=2), Part(replica=2, rank=1, of=2),
    ]  # fmt: skip
    assert master_of(["a", "b", "c", "d"], part_of(config, 4)) == "c"
    assert not [one for one in check(config, jobs_of(config, "het")) if one.fatal]


@pytest.mark.parametrize(
    "overrides", [["fleet.nodes=3", "fleet.replicas=2"], ["fleet.nodes=2", "fleet.gpus_per_replica=3"]]
)
def test_replicas_that_do_not_divide_over_nodes_are_refused(overrides: list[str]) -> None:
    config = vllm("fleet.gpus_per_replica=4", *overrides)
    (one,) = [one for one in check(config, jobs_of(config, "het")) if one.fatal]
    assert one.message.startswith("fleet.nodes got ")


def test_a_held_port_is_the_servers_alone() -> None:
    with hold_port("127.0.0.1") as held, socket.socket() as server, socket.socket() as stranger:
        address = held.getsockname()
        assert listener_uid(address[1]) is None
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
        server.bind(address)
        server.listen()
        assert listener_uid(address[1]) == os.getuid()
        with pytest.raises(OSError, match="in use"):
            stranger.bind(address)
        for _ in range(20):
            with socket.create_connection(address, timeout=5):
                connection, _peer = server.accept()
                connection.close()


if __name__ == "__main__":
    GOLDEN.write_text(golden_text())
