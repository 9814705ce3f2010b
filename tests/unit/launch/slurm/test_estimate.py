"""Estimated starts: what `sbatch --test-only` says, read; placements and shapes compared by it."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest

from conf.errors import ConfigError
from launch.slurm import sbatch
from launch.slurm.estimate import estimate, rank, read_start, shaped
from tests.unit.launch.slurm.configs import make

NOW = datetime(2026, 11, 21, 19, 0, 0)
PLAIN = "sbatch: Job 32 to start at 2026-11-21T19:10:00 using 8 processors on nodes gpu[1-2] in partition gpu\n"
HET = "sbatch: Job 16 to start at 2026-11-21T19:19:33 using 5 processors on cpu1\n"
OLD = "sbatch: Job 16 to start at 2026-11-21T18:59:59 using 5 processors on nodes cpu1 in partition cpu\n"
NO = "allocation failure: Requested node configuration is not available\n"


@pytest.mark.parametrize(
    ("said", "in_s", "nodes"),
    [(PLAIN, 600, "gpu[1-2]"), (HET, 1173, "cpu1"), (OLD, 0, "cpu1"), (PLAIN + HET, 1173, "gpu[1-2],cpu1")],
)
def test_a_start_is_seconds_from_now(said: str, in_s: int, nodes: str) -> None:
    start = read_start("het", 0, said, NOW)
    assert (start.in_s, start.nodes, start.problem) == (in_s, nodes, "")


@pytest.mark.parametrize(
    ("code", "said", "problem"),
    [
        (1, NO, "allocation failure: Requested node configuration is not available"),
        (1, "sbatch: error: invalid partition: x\nallocation failure: Invalid", "invalid partition: x"),
        (1, "", "sbatch --test-only ended with code 1"),
        (0, "sbatch: lua: welcome\n", "lua: welcome"),
    ],
)  # fmt: skip
def test_no_start_has_slurms_own_reason(code: int, said: str, problem: str) -> None:
    start = read_start("het", code, said, NOW)
    assert (start.in_s, start.problem) == (None, problem)


def test_a_placement_starts_when_its_last_job_does_and_asks_once_a_job() -> None:
    asked: list[str] = []

    def test(script: str) -> tuple[int, str]:
        asked.append(script)
        return 0, PLAIN if "run=1,1-1" in script else OLD

    found = estimate(make(), "linked", now=NOW, test=test)
    assert len(asked) == 5
    assert {start.job: start.in_s for start in found.starts} == {
        "control": 0,
        "init": 0,
        "run": 600,
        "eval": 0,
        "fleet": 0,
    }
    assert found.in_s == 600
    assert estimate(make(), "het", now=NOW, test=test).in_s == 600
    assert len(asked) == 6


def test_a_placement_of_which_one_job_can_never_start_never_starts() -> None:
    def test(script: str) -> tuple[int, str]:
        return (1, NO) if "--cpus-per-task=9" in script else (0, OLD)

    found = estimate(make("pools.eval.cpus_per_task=9"), "linked", now=NOW, test=test)
    assert found.in_s is None and "not available" in found.problem


SHAPES = "cluster.shapes=[{pools.run.nodes: 9},{pools: {run: {workers: 3}}, fleet.replicas: 2}]"


def test_shapes_override_keys_with_dots_or_nested() -> None:
    config = make(SHAPES)
    assert shaped(config, 0).pools.run.nodes == 9 and shaped(config, 0).pools.run.workers == 1
    second = shaped(config, 1)
    assert (second.pools.run.workers, second.pools.run.nodes, second.fleet.replicas) == (3, 1, 2)
    assert second.cluster.shapes == []


@pytest.mark.parametrize(
    ("shape", "words"), [("{pools.run.node: 9}", "pools.run.node"), ("{pools.run.nodes: 0}", "got 0")]
)
def test_a_shape_with_a_wrong_key_or_value_is_named(shape: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.shapes\[0\]: ") as caught:
        shaped(make(f"cluster.shapes=[{shape}]"), 0)
    assert words in str(caught.value)


def test_shapes_are_ranked_by_their_start_the_impossible_last() -> None:
    def test(script: str) -> tuple[int, str]:
        if "--nodes=9" in script:
            return 1, NO
        return 0, OLD if "run=3,1-3" in script else PLAIN

    ranked = rank(make(SHAPES), "het", now=NOW, test=test)
    assert [one.place for one in ranked] == [1, -1, 0]
    assert [one.estimate.in_s for one in ranked] == [0, 600, None]
    assert ranked[0].config.pools.run.workers == 3


def test_a_machine_without_slurm_is_an_answer_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sbatch.test_only("#!/bin/sh\n") == (127, "sbatch is not on PATH")
    fake = tmp_path / "sbatch"
    fake.write_text('#!/bin/sh\nread line; echo "sbatch: error: $1 $line" >&2; exit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    code, said = sbatch.test_only("#!/bin/sh\n")
    assert (code, said) == (1, "sbatch: error: --test-only #!/bin/sh\n")
