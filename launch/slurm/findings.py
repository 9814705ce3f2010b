"""What checks find: refusals and warnings about jobs, each one line with its way out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from launch.slurm.errors import ShapeError
from launch.slurm.shapes import Component


@dataclass(frozen=True)
class Finding:
    """One thing found; `fatal` where submitting would fail, wait for ever or lose the run."""

    key: str
    message: str
    fatal: bool = True


def refuse(findings: Iterable[Finding]) -> list[str]:
    """The warnings' lines, where nothing is refused.

    Raises:
        ShapeError: the first refusal.
    """
    findings = list(findings)
    for one in findings:
        if one.fatal:
            raise ShapeError(one.message)
    return [one.message for one in findings]


def section_of(component: Component) -> str:
    """The part of the configuration that a component comes from."""
    return {"control": "control", "fleet": "fleet", "all": "cluster"}.get(component.name, f"pools.{component.name}")
