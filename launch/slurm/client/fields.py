"""Reads the small notations of Slurm's commands: times, limits, memory, TRES, exit codes, node lists. Pure.

Commands are run with TZ=UTC and LC_ALL=C, so a time without a zone is UTC.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

MAX_NODES: Final = 100_000
"""Nodes that one list may expand to: more is a list that was misread."""

NOTHING: Final = frozenset({
    "", "(null)", "N/A", "n/a", "None", "NONE", "Unknown", "UNKNOWN", "None assigned", "UNLIMITED", "unlimited",
    "infinite", "INFINITE", "Partition_Limit", "NOT_SET", "INVALID",
})  # fmt: skip

_UNITS = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_AMOUNT = re.compile(r"([0-9.]+)([KMGTP]?)[nc]?")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")


def text(said: str | None) -> str:
    """The value, or "" for the words that Slurm has for nothing."""
    value = (said or "").strip()
    return "" if value in NOTHING else value


def number(said: str | None) -> int | None:
    """A whole number, or None; "5*" and "5+" are 5."""
    value = text(said).rstrip("*+")
    return int(value) if value.isdigit() else None


def unix_time(said: str | None) -> int | None:
    """Unix seconds of "2026-11-21T19:10:15" in UTC or of plain seconds; None for "N/A", "Unknown" and the like."""
    value = text(said)
    if not value:
        return None
    if value.isdigit():
        return int(value) or None
    try:
        return int(datetime.fromisoformat(value).replace(tzinfo=UTC).timestamp())
    except ValueError:
        return None


def seconds(said: str | None) -> float | None:
    """Seconds of "1-02:03:04", "02:03:04", "03:04", "03:04.567" or plain "34"; None for no time and no limit.

    Slurm writes minutes:seconds where there are two numbers without days, and days-hours[:minutes[:seconds]] with them.
    """
    value = text(said)
    if not value:
        return None
    head, dash, tail = value.partition("-")
    parts = (tail if dash else value).split(":")
    try:
        numbers = [float(part) for part in parts]
        days = int(head) if dash else 0
    except ValueError:
        return None
    numbers = numbers + [0.0] * (3 - len(numbers)) if dash else [0.0] * (3 - len(numbers)) + numbers
    hours, minutes, rest = numbers[-3:]
    return days * 86400 + hours * 3600 + minutes * 60 + rest


def limit_min(said: str | None) -> int | None:
    """A time limit in minutes, rounded up; None for UNLIMITED."""
    value = seconds(said)
    return None if value is None else math.ceil(value / 60)


def memory_mib(said: str | None) -> int | None:
    """MiB of "16000", "16000M", "15.6G" and "500Mc"; a number without a unit is MiB."""
    match = _AMOUNT.fullmatch(text(said).upper().rstrip("NC"))
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def tres(said: str | None) -> dict[str, str]:
    """The parts of "cpu=5,mem=500M,node=5,billing=5,gres/gpu=2"."""
    parts = (part.partition("=") for part in text(said).split(","))
    return {name: value for name, _, value in parts if value}


def gpus_in_tres(said: str | None) -> int:
    """GPUs that a TRES text counts: the untyped sum where it is there, else that of the types."""
    found = tres(said)
    if "gres/gpu" in found:
        return number(found["gres/gpu"]) or 0
    return sum(number(value) or 0 for name, value in found.items() if name.startswith("gres/gpu:"))


def gpus_in_gres(said: str | None) -> int:
    """GPUs of a node's gres text: "gpu:fake:2(S:0-1),shard:8" has 2."""
    plain = re.sub(r"\([^)]*\)", "", text(said))
    counts = (part.split(":") for part in plain.split(",") if part)
    return sum((number(words[-1]) or 0) if len(words) > 1 else 1 for words in counts if words[0] == "gpu")


def wait_status(said: str | int | None) -> tuple[int, int]:
    """(exit code, signal) of a wait status, as squeue's JSON of 22.05 gives it."""
    status = said if isinstance(said, int) else number(said) or 0
    return status >> 8 & 0xFF, status & 0x7F


def exit_column(said: str) -> tuple[int, int]:
    """(exit code, signal) of squeue's column: a wait status in 22.05, "3:0" in 24.11."""
    return exit_pair(said) if ":" in said else wait_status(said)


def exit_pair(said: str | None) -> tuple[int, int]:
    """(exit code, signal) of "3:0" or "0:9", as sacct and scontrol print it."""
    code, _, ended_by = text(said).partition(":")
    return number(code) or 0, number(ended_by) or 0


def job_ids(said: str) -> tuple[str, int | None]:
    """(leader, offset) of "9", "9+1" and a step's "9+1.batch"."""
    leader, plus, offset = said.strip().partition(".")[0].partition("+")
    return leader, number(offset) if plus else None


def node_names(said: str | None) -> tuple[str, ...]:
    """The nodes of a list such as "cpu[1-3,07-09],gpu2,r[1-2]n[0-3]", in its order.

    Raises:
        ValueError: it is no node list, or names more than MAX_NODES.
    """
    names: list[str] = []
    for item in _items(text(said)):
        for name in _expand(item):
            names.append(name)
            if len(names) > MAX_NODES:
                raise ValueError(f"a node list of more than {MAX_NODES} nodes: {item[:80]!r}")
    return tuple(names)


def _items(said: str) -> list[str]:
    """The list's parts at its outer commas."""
    items, depth, start = [], 0, 0
    for at, letter in enumerate(said):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and not depth:
            items.append(said[start:at])
            start = at + 1
    return [item for item in (*items, said[start:]) if item]


def _expand(item: str) -> Iterator[str]:
    pieces = _BRACKET.split(item)
    if any("[" in piece or "]" in piece for piece in pieces):
        raise ValueError(f"no node list: {item[:80]!r}")
    choices = [[piece] if at % 2 == 0 else list(_range(piece)) for at, piece in enumerate(pieces)]
    return map("".join, itertools.product(*choices))


def _range(inside: str) -> Iterator[str]:
    """The numbers of "1-3,07-09", with their zeros."""
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"no range of nodes: {inside[:80]!r}")
        if not dash:
            yield first
            continue
        if int(last) - int(first) >= MAX_NODES:
            raise ValueError(f"a node list of more than {MAX_NODES} nodes: {inside[:80]!r}")
        yield from (f"{value:0{len(first)}d}" for value in range(int(first), int(last) + 1))
