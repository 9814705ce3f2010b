"""A process ends with whoever started it, whatever that one's pid is: in a container it may be 1."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launch import kinds
from tests.support import runs

STARTED = "from launch.kinds import die_with_parent, supervisor; die_with_parent(parent=supervisor()); print('goes on')"


def started(environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", STARTED], env=environment, cwd=runs.REPOSITORY, capture_output=True, text=True
    )
    return done.returncode, done.stdout


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(runs.REPOSITORY))


def test_a_process_goes_on_while_its_supervisor_lives() -> None:
    assert started(kinds.supervised()) == (0, "goes on\n")


def test_a_process_ends_at_once_whose_supervisor_had_ended_before_it_could_ask_for_a_signal() -> None:
    gone = kinds.supervised() | {kinds.SUPERVISED: str(os.getppid())}  # it has another parent than this
    assert started(gone) == (1, "")


def test_a_process_that_nobody_supervises_goes_on() -> None:
    alone = {name: value for name, value in kinds.supervised().items() if name != kinds.SUPERVISED}
    assert started(alone) == (0, "goes on\n")
