"""Reads `sdiag` and `sacctmgr show stats`: how many calls a daemon served, by user and by kind of call."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ROW = re.compile(r"^\s*(\S+)\s+\(\s*(\d+)\)\s+count:(\d+)")


@dataclass(frozen=True)
class Calls:
    """Calls served: `users` by name, `kinds` by the call's name (of all users together)."""

    users: dict[str, int]
    kinds: dict[str, int]


def read_calls(text: str) -> Calls:
    """The two tables of either command's output."""
    tables: dict[str, dict[str, int]] = {"message type": {}, "user": {}}
    table: dict[str, int] = {}
    for line in text.splitlines():
        heading = re.search(r"statistics by (message type|user)", line)
        if heading:
            table = tables[heading[1]]
        elif row := _ROW.match(line):
            table[row[1]] = int(row[3])
        elif not line.startswith(("\t", " ")):
            table = {}
    return Calls(tables["user"], tables["message type"])
