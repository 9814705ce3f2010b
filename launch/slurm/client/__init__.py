"""Asking Slurm: reads, cancel, signal and requeue behind one Protocol, by its commands or by pyslurm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from launch.slurm.client.commands import CommandClient
from launch.slurm.client.protocol import SlurmClient

Backend = Literal["commands", "pyslurm"]


def open_client(clusters: Sequence[str] = (), backend: Backend = "commands") -> SlurmClient:
    """A client for these clusters; none named is the one that this machine belongs to. Opens nothing by itself.

    Raises:
        SlurmUnavailable: pyslurm was asked for and cannot be imported, or does not match this site's libslurm.
    """
    if backend == "pyslurm":
        from launch.slurm.client.pyslurm_backend import PyslurmClient

        return PyslurmClient(clusters)
    return CommandClient(clusters)
