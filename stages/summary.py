"""report/summary.json: the result of a run as its driver, or whoever ended it in its place, left it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stages import sharedfs
from stages.layout import RunLayout


def read_summary(layout: RunLayout) -> dict[str, Any] | None:
    """The summary, or None where there is none. Blocking."""
    try:
        found: dict[str, Any] = msgspec.json.decode(sharedfs.read_bytes(layout.summary))
    except FileNotFoundError:
        return None
    return found


def summary_state(layout: RunLayout) -> str:
    """The state in the summary; empty where there is none. Blocking."""
    return str((read_summary(layout) or {}).get("state", ""))


def write_summary(layout: RunLayout, summary: Mapping[str, Any]) -> None:
    """Replace the summary, laid out for people. Blocking."""
    sharedfs.write_atomic(layout.summary, msgspec.json.format(msgspec.json.encode(summary), indent=2))
