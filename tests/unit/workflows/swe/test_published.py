"""Rows of SWE-bench, SWE-Gym and R2E-Gym: images, commands, what is refused, and grading by a runner's log."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stages.errors import RolloutError, VerifierError
from stages.protocols import Task
from stages.trajectory import Trajectory
from tests.support.sandboxes import DirectorySandbox
from workflows.errors import TaskDataError
from workflows.tasks.rows import BROKEN
from workflows.tasks.swe import ImagedSweTask, published

PATCH = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-old\n+new\n"
ROW = {
    "instance_id": "pallets__flask-1", "repo": "pallets/flask", "base_commit": "0" * 40, "problem_statement": "mend it",
    "patch": PATCH.format("src/flask.py"), "test_patch": PATCH.format("tests/test_a.py") + PATCH.format("tests/x.json"),
    "FAIL_TO_PASS": '["tests/test_a.py::test_new"]', "PASS_TO_PASS": ["tests/test_a.py::test_old[a"], "version": "2",
    "hints_text": "hm", "environment_setup_commit": "1" * 40,
}  # fmt: skip
R2E = {
    "docker_image": "namanjain12/numpy_final:abc", "repo_name": "numpy", "problem_statement": "[ISSUE]\nmend\n[/ISSUE]",
    "expected_output_json": json.dumps({"TestA.test_b": "PASSED", "test_c": "FAILED"}), "prompt": "x",
}  # fmt: skip


def opened(folder: Path, columns: str, *rows: dict[str, Any], **options: Any) -> ImagedSweTask:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ImagedSweTask(str(file), columns=columns, **options)


@pytest.mark.parametrize(
    ("columns", "row", "image", "command"),
    [
        ("swe-bench", ROW, "swebench/sweb.eval.x86_64.pallets_1776_flask-1", "pytest -rA tests/test_a.py"),
        (
            "swe-bench",
            {**ROW, "repo": "django/django", "test_patch": PATCH.format("tests/admin_views/test_x.py")},
            "swebench/sweb.eval.x86_64.pallets_1776_flask-1",
            "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 admin_views.test_x",
        ),
        ("swe-gym", {**ROW, "repo": "getmoto/moto"}, "xingyaoww/sweb.eval.x86_64.pallets_s_flask-1",
         "pytest -n0 -rA tests/test_a.py"),
        ("r2e-gym", R2E, "namanjain12/numpy_final:abc",
         "rm -rf /testbed/r2e_tests; ln -s /root/r2e_tests /testbed/r2e_tests; bash /root/run_tests.sh"),
    ],
)  # fmt: skip
def test_a_rows_image_and_command(tmp_path: Path, columns: str, row: dict[str, Any], image: str, command: str) -> None:
    task = opened(tmp_path, columns, row)
    (read,) = task.rows()
    told = published.instance(columns, read)
    assert isinstance(task, Task) and (task.environment(read).image, told.image) == (image, image)
    assert told.command.endswith(command)
    public = {name: value for name, value in read.items() if name not in task.private}
    assert task.environment(public) == task.environment(read) and task.prompt(public) == task.prompt(read)
    assert not set(public) & {"patch", "test_patch", "FAIL_TO_PASS", "hints_text", "expected_output_json", "prompt"}
    assert "[ISSUE]" not in task.prompt(read)[0].content


@pytest.mark.parametrize(
    ("columns", "change", "said"),
    [
        ("swe-bench", {"image_assets": {"problem_statement": ["a.png"]}}, "SWE-bench Multimodal"),
        ("swe-bench", {"repo": "sympy/sympy"}, "sympy/sympy is tested by bin/test"),
        ("swe-bench", {"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
        ("swe-bench", {"FAIL_TO_PASS": 3}, "FAIL_TO_PASS or PASS_TO_PASS"),
        ("swe-bench", {"test_patch": "nothing"}, "test_patch changes no file"),
        ("swe-gym", {"problem_statement": None}, "problem_statement is missing"),
        ("r2e-gym", {"docker_image": "x", "expected_output_json": "[]"}, "expected_output_json"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path, columns: str, change: dict[str, Any], said: str) -> None:
    task = opened(tmp_path, columns, {**ROW, **change})
    (broken,) = task.rows()
    assert said in broken[BROKEN]
    with pytest.raises(RolloutError):
        asyncio.run(task.prepare(None, broken))  # type: ignore[arg-type]
    with pytest.raises(VerifierError, match=r"x: ") as caught:
        asyncio.run(task.verify(None, {**ROW, **change, "task_id": "x"}, Trajectory([], [])))  # type: ignore[arg-type]
    assert caught.value.detail["final"]


def test_another_data_set_is_refused() -> None:
    with pytest.raises(TaskDataError, match=r"task\.options\.columns: got 'swe-lite'"):
        ImagedSweTask("x", columns="swe-lite")


@pytest.mark.parametrize(
    ("wanted", "found", "share"),
    [
        ({"a::b": "passed"}, {"a::b": "passed"}, 1.0),
        ({"a::b": "passed", "a::c": "passed"}, {"a::b": "passed", "a::c": "failed"}, 0.5),
        ({"a::b[x": "passed"}, {"a::b[x y]": "passed"}, 1.0),
        ({"a::b[x": "passed"}, {"a::b[x y]": "passed", "a::b[x z]": "failed"}, 0.0),
        ({"T.test": "passed"}, {"f.py::T::test": "passed", "T.test": "failed"}, 0.0),
        ({"T.test_b": "passed", "test_c": "failed"}, {"r/t.py::T::test_b": "passed", "t.py::test_c": "failed"}, 1.0),
        ({"test_c": "passed"}, {"a.py::test_c": "passed", "b.py::test_c": "failed"}, 0.0),
        ({"test_c": "passed"}, {"a.py::TestA::test_c": "passed", "x.test_c": "passed"}, 0.0),
        ({"test_p[a": "passed"}, {"t.py::test_p[a - b]": "passed"}, 1.0),
        ({"T.p[a - b]": "passed"}, {"t.py::T::p[a - b]": "passed"}, 1.0),
        ({"a::b": "passed"}, {}, 0.0), ({}, {"a": "passed"}, 0.0),
    ],
)  # fmt: skip
def test_the_share_of_tests_as_they_must_be(wanted: dict[str, str], found: dict[str, str], share: float) -> None:
    assert published.agreement(wanted, found) == share


def test_r2e_gyms_tests_are_moved_out_of_the_repository(tmp_path: Path) -> None:
    root, tests, kept = tmp_path / "testbed", tmp_path / "r2e_tests", tmp_path / "kept"
    for folder in (root, tests, kept):
        folder.mkdir()
    (tests / "test_a.py").write_text("x")
    script = published.r2e_moved(str(root), str(tests), str(kept))
    assert subprocess.run(script, shell=True, check=False).returncode != 0, "there is no run_tests.sh"
    (root / "run_tests.sh").write_text("pytest")
    for _ in range(2):
        subprocess.run(script, shell=True, check=True)
        assert [one.relative_to(kept).as_posix() for one in sorted(kept.rglob("*"))] == [
            "r2e_tests", "r2e_tests/test_a.py", "run_tests.sh",
        ]  # fmt: skip
    assert list(root.iterdir()) == [] and not tests.exists()
    assert {".venv", "run_tests.sh"} <= set(opened(tmp_path, "r2e-gym", R2E).environment({**R2E}).protected)


def test_nothing_of_later_commits_is_left(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    root.mkdir()
    git = "git -c user.name=a -c user.email=a@b"

    def run(script: str) -> str:
        return subprocess.run(script, shell=True, check=True, cwd=root, capture_output=True, text=True).stdout

    run("git init -q && echo '*.log' > .gitignore && echo 1 > 'a [b].py' && echo x > kept.log && git add -f .")
    run(f"{git} commit -qm x")
    run(f"git tag v1.0 && echo 2 > 'a [b].py' && echo n > new.py && git add . && {git} commit -qm fix && git tag v2.0")
    fix = run("git rev-parse HEAD").strip()
    run("git checkout -q v1.0 && echo built > not_tracked && echo y > kept.log")
    task = opened(tmp_path, "swe-bench", ROW, root=str(root))
    (row,) = task.rows()
    asyncio.run(task.prepare(DirectorySandbox(tmp_path), row))
    assert run("git status --porcelain").split() == ["??", "not_tracked"]
    assert run("git ls-files").splitlines() == [".gitignore", "a [b].py", "kept.log"]
    assert run("git tag").split() == ["v1.0"] and run("git describe --tags").startswith("v1.0-1-g")
    assert subprocess.run(["git", "cat-file", "-e", fix], cwd=root, capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize(("solved", "value"), [(True, 1.0), (False, 0.0)])
def test_verify_runs_the_repositorys_own_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solved: bool, value: float
) -> None:
    sandbox = DirectorySandbox(tmp_path)
    root = tmp_path / "work"
    (root / "tests").mkdir()
    (root / "src").mkdir()
    for name in ("src/flask.py", "tests/test_a.py", "tests/x.json"):
        (root / name).write_text("old\n")
    git = "git -c user.name=a -c user.email=a@b"
    subprocess.run(f"git init -q && git add . && {git} commit -qm x", shell=True, check=True, cwd=root)
    (root / "tests/test_a.py").write_text("the agent's\n")
    if solved:
        (root / "src/flask.py").write_text("new\n")
    runner = 'test "$(cat tests/test_a.py)" = new && for t in test_new "test_old[a b]"; do ' \
        'if grep -q new src/flask.py; then echo "tests/test_a.py::$t PASSED"; fi; done'  # fmt: skip
    told = published.instance("swe-bench", ROW)
    command = f"cd {root} && {runner}"
    monkeypatch.setattr(published, "instance", lambda columns, row: published.Instance(
        told.image, command, "pytest", told.expected, told.files))  # fmt: skip
    task = opened(tmp_path, "swe-bench", ROW, root=str(root))
    (row,) = task.rows()
    reward = asyncio.run(task.verify(sandbox, row, Trajectory([], [])))
    assert (reward.value, reward.parts["passed"], reward.grading) == (value, value, "untrusted")
