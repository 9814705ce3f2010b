"""workflow=train on two real vLLM servers that the run starts itself: three updates, each pushed to both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.shards import ShardReader
from tests.support import runs
from tests.vllm.conftest import PYTHON

UPDATES = 3


def torch_of_vllm(scratch: Path) -> dict[str, str]:
    """An environment whose Pythons find vLLM's torch too, after all that their own installation has."""
    assert PYTHON is not None
    code = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_path('purelib'))"
    *version, packages = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    ours = [str(part) for part in sys.version_info[:2]]
    assert version == ours, f"vLLM's torch is of Python {version}, this is {ours}: remove .venv-vllm, it is made anew"
    scratch.mkdir()
    (scratch / "sitecustomize.py").write_text(f"import sys\nsys.path.append({packages!r})\n")
    return {**os.environ, "PYTHONPATH": str(scratch)}


@pytest.mark.timeout(1500)
def test_three_updates_reach_both_servers_and_every_token_is_of_its_version(
    tmp_path: Path, tell: Callable[..., None]
) -> None:
    run_dir = tmp_path / "run"
    command = runs.command(
        run_dir, "workflow=train", "fleet=vllm", "fleet.replicas=2", f"fleet.python={PYTHON}", "fleet.model=tiny-half",
        "task.limit=512", "group_size=8", "agent.max_turns=4", "sampling.max_tokens=64", f"train.steps={UPDATES}",
        "train.groups=4", "train.threads=1",
    )  # fmt: skip
    done = subprocess.run(
        command, cwd=runs.REPOSITORY, env=torch_of_vllm(tmp_path / "torch"), capture_output=True, text=True,
        timeout=1400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads((run_dir / "report" / "train.json").read_text())
    with ShardReader(run_dir) as reader:
        rows = [row for group in reader.groups() for row in group.rows]
    turns = [turn for row in rows for turn in row["turns"]]
    kept = ("gap_max", "gap_mean", "gap_tokens", "lag_mean", "lag_max", "groups_asked", "groups_kept", "seconds")
    tell(**{name: report[name] for name in kept}, rows=len(rows))
    assert (report["updates"], report["groups_used_twice"], report["masked"]) == (UPDATES, 0, 0)
    assert 0 < report["gap_max"] <= 1e-4 and report["gap_tokens"] > 500
    assert {span["version"] for row in rows for span in row["policy_versions"]} == {0, 1, 2}
    assert len({turn["replica"] for turn in turns}) == 2
