"""Runs whose leaders are tested: one of a heterogeneous job, one of linked jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.launch.slurm.leaders import JobSide

Sides = Callable[..., JobSide]


@pytest.fixture
def side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sides:
    """Makes the run; keys of `cluster` as keywords."""

    def make(placement: str = "het", **cluster: object) -> JobSide:
        return JobSide(tmp_path / "run", monkeypatch, placement, **cluster)

    return make
