"""The JSON object that every benchmark prints: one envelope, with the machine that the figures were taken on."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

VERSION = 1


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def machine() -> dict[str, Any]:
    """What the figures were taken on; `load1` above `cpus` means that others were busy too."""
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": _memory_gib(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load1": round(os.getloadavg()[0], 2),
    }


def emit(
    bench: str,
    results: Mapping[str, float],
    *,
    peers: Mapping[str, Mapping[str, float]] | None = None,
    ratios: Mapping[str, float] | None = None,
    errors: Sequence[str] = (),
    as_json: bool = True,
) -> int:
    """Print the benchmark's object, or a table for people.

    Args:
        bench: the benchmark's name.
        results: figures of ours, units in the key.
        peers: figures of others, taken in the same run.
        ratios: ours over theirs.
        errors: what went wrong; figures that could not be taken are left out.
        as_json: one line of JSON; otherwise one figure a line.

    Returns:
        The exit code: 1 where there are errors.
    """
    report = {
        "bench": bench,
        "v": VERSION,
        "machine": machine(),
        "results": dict(results),
        "peers": {name: dict(values) for name, values in (peers or {}).items()},
        "ratios": dict(ratios or {}),
        "errors": list(errors),
    }
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        rows = {**report["results"], **report["ratios"]}
        rows |= {f"{name}.{key}": value for name, values in report["peers"].items() for key, value in values.items()}
        sys.stdout.write("".join(f"{key:40} {value:14,.4g}\n" for key, value in rows.items()))
        sys.stdout.write("".join(f"error: {error}\n" for error in report["errors"]))
    return 1 if errors else 0
