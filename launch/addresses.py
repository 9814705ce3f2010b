"""Which address of this node the others reach it by: loopback on one machine, a chosen interface's on a cluster."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys

from conf.schema import Config
from launch.errors import LaunchError
from launch.slurm.shapes import jobs_of

_SIOCGIFADDR = 0x8915
_ELSEWHERE = ("192.0.2.1", 9)
"""An address that no network routes to anybody (RFC 5737): asking which way leads there sends nothing."""


def listen_address(config: Config) -> str:
    """The IPv4 address that this node's servers bind and publish.

    Raises:
        LaunchError: the configured interface has no address here, or this node has several and none is the obvious one.
    """
    if config.placement.name == "local":
        return "127.0.0.1"
    if config.cluster.interface:
        return _of_interface(config.cluster.interface)
    found = _of_this_host()
    if found.startswith("127.") and not _is_one_node(config):
        _refuse_loopback()
    return found


def _is_one_node(config: Config) -> bool:
    return config.placement.name == "colocated" and jobs_of(config, "colocated")[0].nodes == 1


def _refuse_loopback() -> None:
    """Other nodes cannot reach this one by its loopback; where it has nothing else, they may all be this machine."""
    host = socket.gethostname()
    others = [name for _, name in socket.if_nameindex() if not _of(name).startswith(("127.", "none"))]
    if others:
        raise LaunchError(
            f"{host}: its name stands for the loopback address alone and no route leads out of it, so that other nodes "
            f"would not reach it; set cluster.interface to one of {', '.join(others)}"
        )
    sys.stderr.write(
        f"rollmill: {host} has the loopback address alone: no other node reaches it; cluster.interface names another\n"
    )


def _of(name: str) -> str:
    """An interface's address, or "none"."""
    try:
        return _of_interface(name)
    except LaunchError:
        return "none"


def _of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            there = ", ".join(interface for _, interface in socket.if_nameindex())
            raise LaunchError(
                f"cluster.interface got {name!r}, which has no IPv4 address on {socket.gethostname()} "
                f"({error.strerror}); interfaces there: {there}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _of_this_host() -> str:
    """What the host's name stands for; where that is loopback only (Debian's habit), the way out of this node."""
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = ""
    if named and not named.startswith("127."):
        return named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
