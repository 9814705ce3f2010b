"""`rollmill doctor`: what is tried, what is asked for, and what is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import doctor
from launch.doctor import Check, run_directory
from launch.verbs.doctor import run, text_of
from sandbox.cgroup import delegation, own_group


def test_a_run_directory_that_is_not_there_yet_is_judged_by_its_place(tmp_path: Path) -> None:
    checks = {check.name: check for check in run_directory(tmp_path / "runs" / "new")}
    assert checks["fence"].ok and checks["fence"].found == "stat"
    assert str(tmp_path) in checks["filesystem"].found and "stripes" not in checks
    assert list(tmp_path.iterdir()) == []


def test_on_lustre_the_layout_of_the_shards_is_advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "filesystem_of", lambda path, mounts: "lustre")
    checks = {check.name: check for check in run_directory(tmp_path / "run")}
    assert "lfs setstripe" in checks["stripes"].found and checks["stripes"].found.endswith(f"{tmp_path}/run/shards")


def test_a_filesystem_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> bool:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("stages.sharedfs.link", refused)
    (fence,) = [check for check in run_directory(tmp_path / "run") if check.name == "fence"]
    assert not fence.ok and fence.needed and "hard links" in fence.found and list(tmp_path.iterdir()) == []


def test_what_is_missing_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine with nothing installed."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert run("doctor", ["--json", "--scratch", str(tmp_path)]) == 1
    said = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in said["checks"]["machine"]}
    assert said["ok"] is False and list(said["checks"]) == ["machine"]
    for name in ("user namespaces", "kernel overlay", "bubblewrap", "apptainer", "fuse-overlayfs", "slurm"):
        assert not checks[name]["ok"] and checks[name]["ask"], name
    assert checks["python"]["ok"]
    assert [path for path in tmp_path.rglob("*") if path.name.startswith("owned-")] == []


def test_here_a_sandbox_can_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", [str(tmp_path / "run"), "--scratch", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "run directory:" in said and "isolates" in said


def test_the_text_lists_what_to_ask_for_below() -> None:
    text = text_of({"machine": [Check("one", ok=True, found="there"), Check("two", ok=False, found="no", ask="two")]})
    assert text.splitlines()[1].split() == ["ok", "one", "there"] and text.splitlines()[-1].split() == ["two", "two"]


def test_a_delegated_group_is_found_and_another_is_not(tmp_path: Path) -> None:
    mounts = f"cgroup2 {tmp_path} cgroup2 rw 0 0\nproc /proc proc rw 0 0\n"
    group = own_group("9:pids:/\n0::/user/job\n", mounts)
    assert group == tmp_path / "user/job" and own_group("9:pids:/\n", mounts) is None
    assert not delegation(group)[0] and not delegation(None)[0]
    group.mkdir(parents=True)
    (group / "cgroup.subtree_control").touch()
    (group / "cgroup.controllers").write_text("memory\n")
    assert "cpu, pids" in delegation(group)[1]
    (group / "cgroup.controllers").write_text("cpu memory pids io\n")
    assert delegation(group) == (True, str(group))
