"""A user's own package outside the repository, and a working directory of its own for each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

OWN_PACKAGE = "own_rollmill_pkg"
OWN_SOURCE = '''
class MyTask:
    """Stands for a task that somebody wrote."""

    def __init__(self, x=0):
        self.x = x

class MyAgent:
    """Stands for an agent that somebody wrote."""
'''
OWN = [f"task._target_={OWN_PACKAGE}.MyTask", f"agent._target_={OWN_PACKAGE}.MyAgent"]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory that holds somebody's own package; what the test imports of it is forgotten afterwards."""
    work = tmp_path / "work"
    (work / OWN_PACKAGE).mkdir(parents=True)
    (work / OWN_PACKAGE / "__init__.py").write_text(OWN_SOURCE)
    monkeypatch.chdir(work)
    before = list(sys.path)
    yield work
    sys.path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == OWN_PACKAGE]:
        del sys.modules[name]
