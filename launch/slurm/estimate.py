"""When jobs would start, by `sbatch --test-only`: of placements, and of the alternative shapes of a site, ranked.

Slurm answers for one component at a time, as if it were alone, from what it plans at this moment: a job of several
components starts no earlier than the latest of them. Nothing is submitted and nothing written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from conf.convert import plain, structure
from conf.errors import ConfigError
from conf.load import validate
from conf.schema import Config
from launch.slurm import executor, sbatch
from launch.slurm.shapes import Job, SlurmPlacement, jobs_of

PLACEMENTS: Final[tuple[SlurmPlacement, ...]] = ("het", "linked", "colocated")

_STARTS = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?: using \d+ processors)?(?: on (?:nodes )?(\S+))?")

Test = Callable[[str], tuple[int, str]]
"""Hands a batch script to `sbatch --test-only`: (exit code, what it said)."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """When one job would start: `in_s` seconds from now on `nodes`, or why that is not known."""

    job: str
    in_s: int | None = None
    nodes: str = ""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """When all jobs of a placement would have started."""

    placement: SlurmPlacement
    starts: tuple[Start, ...]

    @property
    def in_s(self) -> int | None:
        """Seconds from now; None where one of the jobs would not start, or nothing is known of it."""
        known = [start.in_s for start in self.starts]
        return None if not known or any(one is None for one in known) else max(one or 0 for one in known)

    @property
    def problem(self) -> str:
        """What Slurm said of the first job that it would not start."""
        return next((start.problem for start in self.starts if start.problem), "")


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One of `cluster.shapes`: its place in the list (-1: the configuration as it is), its keys, its estimate."""

    place: int
    keys: Mapping[str, Any]
    config: Config
    estimate: Estimate


def estimate(
    config: Config, placement: SlurmPlacement, *, now: datetime | None = None, test: Test | None = None
) -> Estimate:
    """When the jobs of this placement would start; one call of slurmctld a component. Blocking."""
    test = test or sbatch.test_only
    return Estimate(
        placement=placement, starts=tuple(_start(job, config, now, test) for job in jobs_of(config, placement))
    )


def rank(
    config: Config, placement: SlurmPlacement, *, now: datetime | None = None, test: Test | None = None
) -> list[Ranked]:
    """The configuration and its `cluster.shapes`, the one that would start first at the top. Blocking.

    Raises:
        ConfigError: a shape names a key or value that does not exist.
    """
    shaped_configs = [(-1, {}, config), *((n, keys, shaped(config, n)) for n, keys in enumerate(config.cluster.shapes))]
    found = [
        Ranked(place=place, keys=keys, config=one, estimate=estimate(one, placement, now=now, test=test))
        for place, keys, one in shaped_configs
    ]
    return sorted(found, key=lambda one: (one.estimate.in_s is None, one.estimate.in_s or 0))


def shaped(config: Config, place: int) -> Config:
    """The configuration with the keys of one of its `cluster.shapes`, given nested or with dots.

    Raises:
        ConfigError: a key or value that does not exist.
    """
    data = plain(replace(config, cluster=replace(config.cluster, shapes=[])))
    try:
        _merge(data, config.cluster.shapes[place])
        found = structure(Config, data)
        validate(found)
    except ConfigError as error:
        raise ConfigError(f"cluster.shapes[{place}]: {error}", key=error.key, value=error.value) from error
    return found


def _merge(data: dict[str, Any], keys: Mapping[str, Any]) -> None:
    for name, value in keys.items():
        first, _, rest = name.partition(".")
        if rest:
            value = {rest: value}
        if isinstance(value, Mapping) and isinstance(data.get(first), dict):
            _merge(data[first], value)
        else:
            data[first] = value


def _start(job: Job, config: Config, now: datetime | None, test: Test) -> Start:
    code, said = test(executor.text(job, config, run_id="plan", name=f"rollmill-plan-{job.name}"))
    return read_start(job.name, code, said, now or datetime.now())


def read_start(job: str, code: int, said: str, now: datetime) -> Start:
    """What `sbatch --test-only` said of a job; times are local, without a zone, as Slurm prints them."""
    matches = _STARTS.findall(said)
    if code == 0 and matches:
        seconds = [(datetime.fromisoformat(when) - now).total_seconds() for when, _ in matches]
        nodes = ",".join(dict.fromkeys(nodes for _, nodes in matches if nodes))
        return Start(job=job, in_s=max(0, round(max(seconds))), nodes=nodes)
    return Start(job=job, problem=sbatch.first_error(said) or f"sbatch --test-only ended with code {code}")
