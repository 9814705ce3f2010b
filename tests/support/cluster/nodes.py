"""Reads `scontrol show node`: the state of every node. (sinfo of 24.11 may show an old one until somebody asks so.)"""

from __future__ import annotations

import re

_STATE = re.compile(r"^NodeName=(\S+) .*?\bState=(\S+)", re.MULTILINE)
READY = ("idle", "mixed", "allocated")
"""States in which a node takes or has jobs."""


def read_states(text: str) -> dict[str, str]:
    """State by node from `scontrol -o show node`: `idle`, `mixed`, `down`, ...; a `*` means that it does not answer."""
    found = {}
    for name, words in _STATE.findall(text):
        base, *flags = words.split("+")
        silent = "*" in words or "NOT_RESPONDING" in flags
        found[name] = base.rstrip("*").lower() + "*" * silent
    return found
