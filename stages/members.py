"""members/: one JSON file for each live process of a run, for people and for status without the router."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from stages import sharedfs
from stages.identity import here, slurm_job_id
from stages.layout import RunLayout


class Member(msgspec.Struct, frozen=True):
    """One process; `endpoint` is its URL where it has one."""

    kind: str
    id: str
    node: str
    pid: int
    endpoint: str | None
    epoch: int
    slurm: str | None
    started_at: float


@contextlib.asynccontextmanager
async def present(
    layout: RunLayout, kind: str, member: str, *, endpoint: str | None = None, epoch: int = 0
) -> AsyncIterator[None]:
    """This process's file exists inside the block."""
    me = here()
    record = Member(kind, member, me.node, me.pid, endpoint, epoch, slurm_job_id(), time.time())
    await asyncio.to_thread(sharedfs.write_atomic, layout.member(member), msgspec.json.encode(record))
    try:
        yield
    finally:
        await asyncio.shield(asyncio.to_thread(sharedfs.unlink, layout.member(member)))


def names(layout: RunLayout) -> frozenset[str]:
    """The ids of all members as files say."""
    files = (name for name in sharedfs.list_dir(layout.members) if not name.startswith("."))
    return frozenset(name.removesuffix(".json") for name in files if name.endswith(".json"))


def read_all(layout: RunLayout) -> list[dict[str, Any]]:
    """All members as files say; a file that goes away meanwhile is left out."""
    members = []
    for name in sharedfs.list_dir(layout.members):
        if name.endswith(".json") and not name.startswith("."):
            with contextlib.suppress(FileNotFoundError):
                members.append(msgspec.json.decode(sharedfs.read_bytes(layout.members / name)))
    return members
