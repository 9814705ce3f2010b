"""Bad input: one clear line, a non-zero exit, and nothing half-made that a second try would trip over."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support import runs


def one_line(result: object, *words: str) -> None:
    """The command refused in one line that says all of `words`."""
    assert result.returncode in {1, 2}, result  # type: ignore[attr-defined]
    errors = result.stderr  # type: ignore[attr-defined]
    assert errors.count("\n") == 1 and errors.startswith("rollmill: "), errors
    for word in words:
        assert word in errors, errors


def test_a_model_directory_without_weights(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(runs.REPOSITORY / "workflows" / "policies" / "tiny", broken)
    (broken / "model.safetensors").unlink()
    one_line(runs.run(tmp_path / "run", f"fleet.model={broken}"), str(broken), "safetensors")
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    one_line(runs.run(tmp_path / "run", "fleet.model=tinny"), "fleet.model", "tinny", "tiny")
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    one_line(runs.run(tmp_path / "file" / "run", "task.limit=1"), "run_dir", "file")


def test_a_directory_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    one_line(runs.run(tmp_path, "task.limit=1"), "not empty", "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sampling.temperatur=1", ("sampling.temperatur", "temperature")),
        ("group_size=zero", ("group_size", "zero")),
        ("group_size=0", ("group_size", "0")),
        ("task=stem", ("task.path", "task=stem")),
        ("task=nothing", ("task", "nothing", "arith")),
        ("lease.heartbeat_s=20", ("lease.heartbeat_s",)),
    ],
)
def test_a_wrong_key_or_value_stops_before_anything_starts(
    tmp_path: Path, override: str, words: tuple[str, ...]
) -> None:
    one_line(runs.run(tmp_path / "run", override), *words)
    assert not (tmp_path / "run").exists()


def test_no_user_namespaces(tmp_path: Path) -> None:
    """A machine that cannot isolate: bwrap is there and fails, as where an administrator has forbidden namespaces."""
    fake = tmp_path / "bin"
    fake.mkdir()
    for name in ("bwrap", "unshare"):
        (fake / name).write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
        (fake / name).chmod(0o755)
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{fake}:{before}"
    try:
        result = runs.run(tmp_path / "run", "task.limit=1")
    finally:
        os.environ["PATH"] = before
    one_line(result, "sandbox")
    assert not (tmp_path / "run").exists()
    again = runs.run(tmp_path / "run", "task.limit=2", "group_size=1")
    assert again.returncode == 0, again.stderr


def test_sandbox_none_runs_by_name_alone_and_warns(tmp_path: Path) -> None:
    result = runs.run(tmp_path / "run", "sandbox=none", "task.limit=4", "group_size=1")
    assert result.returncode == 0, result.stderr
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").rglob("run-*.log"))
    assert "without isolation" in result.stderr and "without isolation" in logs
