"""How a run stands: asked of its router where that answers, else read from its files alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import msgspec

from stages import beacon, manifest, members, sharedfs
from stages.errors import ManifestError, RouterUnreachableError, ServiceError
from stages.http import RouterLink
from stages.identity import is_surely_dead
from stages.journal.history import read_events
from stages.layout import RunLayout
from stages.ledger.machine import Ledger
from stages.router.views import status_view

ASK_S: Final = 3.0


async def fetch_status(run_dir: Path) -> dict[str, Any]:
    """The document of `status --json`.

    Raises:
        ManifestError: no run directory.
    """
    layout = RunLayout(run_dir)
    if await asyncio.to_thread(manifest.read, layout) is None:
        raise ManifestError(f"{run_dir} is no run directory: it has no manifest.json")
    found = await asyncio.to_thread(beacon.read, layout)
    if found is not None and not found.ended and not is_surely_dead(found.identity):
        try:
            async with RouterLink("trainer", run_dir=run_dir) as link:
                status = await link.call("GET", "/v1/status", answer=dict[str, Any], timeout_s=ASK_S, patience_s=ASK_S)
                return {"slurm": {}, "stuck": None, **status}
        except (RouterUnreachableError, ServiceError):
            pass
    return await asyncio.to_thread(read_status, layout)


def read_status(layout: RunLayout) -> dict[str, Any]:
    """The same document from files: the summary of a run that has ended, else a replay of its journal."""
    if sharedfs.exists(layout.summary):
        summary: dict[str, Any] = msgspec.json.decode(sharedfs.read_bytes(layout.summary))
        return summary
    ledger = Ledger()
    for event in read_events(layout):
        ledger.apply(event)
    view = status_view(ledger)
    stuck = None
    found = beacon.read(layout)
    if found is not None and (found.ended or is_surely_dead(found.identity)):
        view["state"], stuck = "failed", "no process of it is alive; the command that started it carries it on"
    if not view["run_id"]:
        view["run_id"], view["state"] = _manifest_id(layout), "starting"
    return {**view, "fleet": [], "members": members.read_all(layout), "slurm": {}, "stuck": stuck}


def _manifest_id(layout: RunLayout) -> str:
    found = manifest.read(layout)
    return found.run_id if found is not None else ""
