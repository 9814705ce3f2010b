"""At least 40 faults over real runs: nothing lost, nothing twice, nothing left over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.schedule import KINDS
from tests.support.runs import REPOSITORY

KILLS, SEED = 40, 2


@pytest.mark.timeout(2400)
def test_forty_faults_in_real_runs_break_no_promise(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-m", "tests.chaos", "--kills", str(KILLS), "--seed", str(SEED), "--json",
         "--keep", str(tmp_path / "runs")],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=2380, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["kills"] >= KILLS and report["violations"] == [] and report["double"] > 0
    rollouts = report["rollouts"]
    assert rollouts["accepted"] == 256 * report["runs"]
    assert rollouts["accepted"] == rollouts["completed"] + rollouts["failed"] + rollouts["cancelled"]
    assert all(sum(report["coverage"][kind].values()) > 0 for kind in KINDS)
