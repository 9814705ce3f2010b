"""task=harbor without a sandbox: what of the format is followed, what is refused by name, Dockerfiles, canaries."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Budget
from sandbox.bashtext import BASE_ENV
from stages.errors import RolloutError
from stages.protocols import Task
from tests.support import harbor_tasks
from workflows.errors import TaskDataError
from workflows.tasks.harbor import HarborTask
from workflows.tasks.harbor.canaries import canaries
from workflows.tasks.harbor.directory import opened
from workflows.tasks.harbor.dockerfile import Copy, DockerfileError, Run, read
from workflows.tasks.harbor.settings import SettingsError, settings
from workflows.tasks.rows import BROKEN
from workflows.tasks.swe import ImagedSweTask


def test_rows_are_directories_and_hold_neither_tests_nor_solutions(tmp_path: Path) -> None:
    task = HarborTask(str(harbor_tasks.write(tmp_path)))
    rows = list(task.rows())
    assert isinstance(task, Task) and [row["task_id"] for row in rows] == sorted(harbor_tasks.TASKS)
    told = str(rows)
    assert "grep" not in told and "Hello, world!' >" not in told and "canary 1234" not in told
    by_name = {row["task_id"]: row for row in rows}
    assert task.environment(by_name["artifact"]).workspace == ("/app/out",)
    assert task.environment(by_name["sum"]).workspace == ("/app/work",)
    assert task.environment(by_name["hello"]).image == "mill/base:latest", "as FROM names it: the store knows both"
    assert next(iter(HarborTask(str(tmp_path / "hello")).rows()))["task_id"] == "hello"
    assert len(list(HarborTask(str(tmp_path), limit=2).rows())) == 2


def test_the_environments_key_is_of_what_init_does_and_of_nothing_hidden(tmp_path: Path) -> None:
    root = harbor_tasks.write(tmp_path, ["sum"])

    def key() -> str:
        (row,) = HarborTask(str(root)).rows()
        return HarborTask(str(root)).environment(row).setup_key

    first = key()
    (root / "sum/tests/test.sh").write_text("true\n")
    (root / "sum/instruction.md").write_text("another\n")
    assert key() == first
    (root / "sum/environment/numbers.txt").write_text("1\n")
    assert key() != first


def broken(root: Path, change: Any) -> str:
    change(harbor_tasks.write(root, ["hello", "sum"]) / "hello")
    rows = {row["task_id"]: row for row in HarborTask(str(root)).rows()}
    assert BROKEN not in rows["sum"]
    with pytest.raises(RolloutError) as caught:
        asyncio.run(HarborTask(str(root)).prepare(None, rows["hello"]))  # type: ignore[arg-type]
    assert caught.value.detail["final"]
    return str(rows["hello"][BROKEN])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: (d / "task.toml").write_text("a = \n"), "task.toml: "),
        (lambda d: (d / "instruction.md").unlink(), "instruction.md"),
        (lambda d: (d / "tests/test.sh").unlink(), "tests/test.sh is missing"),
        (lambda d: (d / "tests/Dockerfile").write_text("FROM x\n"), "an image of the verifier's own"),
        (lambda d: (d / "environment/Dockerfile").unlink(), "neither environment/Dockerfile nor"),
        (lambda d: (d / "environment/docker-compose.yaml").write_text(""), "several containers"),
        (lambda d: (d / "tests/leak").symlink_to("/etc/passwd"), "neither a file nor a link to one of"),
        (
            lambda d: (d / "environment/Dockerfile").write_text("FROM a\nWORKDIR /tests/x\n"),
            "the format's own directory",
        ),
    ],
)
def test_a_directory_that_cannot_be_used_fails_alone(tmp_path: Path, change: Any, said: str) -> None:
    assert said in broken(tmp_path, change)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"steps": [{}]}, "steps is not supported: a task of several steps"),
        ({"environment": {"mcp_servers": [{"name": "x"}]}}, "environment.mcp_servers is not supported"),
        ({"environment": {"healthcheck": {"command": "x"}}}, "environment.healthcheck is not supported"),
        ({"environment": {"gpus": 1}}, "environment.gpus"),
        ({"environment": {"os": "windows"}}, "environment.os 'windows'"),
        ({"environment": {"colour": "red"}}, "environment.colour is no key of the format"),
        ({"environment": {"env": {"KEY": "${KEY}"}}}, "KEY takes a variable of this machine"),
        ({"environment": {"env": {"a b": "1"}}}, "must be a variable"),
        ({"environment": {"workdir": "app"}}, "is not absolute"),
        ({"environment": {"workdir": "/logs"}}, "the format's own directory"),
        ({"environment": "x"}, "environment must be a table"),
        ({"verifier": {"user": "judge"}}, "verifier.user 'judge'"),
        ({"agent": {"user": "nobody"}}, "agent.user 'nobody'"),
        ({"verifier": {"timeout_sec": 0}}, "verifier.timeout_sec must be seconds"),
        ({"verifier": {"environment_mode": "separate"}}, "artifacts names nothing"),
        ({"verifier": {"environment_mode": "both"}}, "allowed are shared, separate"),
        ({"verifier": {"environment": {"docker_image": "x"}}}, "an image of the verifier's own"),
        ({"artifacts": ["/app/*.txt"]}, "without wildcards"),
        ({"artifacts": [{"source": "/a", "destination": "b"}]}, "destination is not supported"),
        ({"unknown": 1}, "unknown is no key of the format"),
    ],
)
def test_what_is_not_followed_is_refused_by_name(data: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings(data)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_followed() -> None:
    found = settings({
        "schema_version": "1.2", "task": {"name": "a/b"}, "metadata": {"artifacts_are_data": True, "any": [1]},
        "artifacts": ["/app/out", {"source": "/data/x.json"}],
        "verifier": {"environment_mode": "separate", "timeout_sec": 5, "env": {"A": "1"}, "user": "root"},
        "environment": {"docker_image": "a/b:1", "cpus": 2, "memory_mb": 512, "allow_internet": False, "gpus": 0,
                        "workdir": "/srv/", "mcp_servers": []},
        "solution": {"env": {"B": "2"}},
    })  # fmt: skip
    assert (found.image, found.workdir, found.verifier_s, found.separate) == ("a/b:1", "/srv", 5.0, True)
    assert found.artifacts == ("/app/out", "/data/x.json") and found.data_alone
    assert (found.verifier, found.solution) == ({"A": "1"}, {"B": "2"})


def test_only_data_in_a_sandbox_of_its_own_is_trusted(tmp_path: Path) -> None:
    file = harbor_tasks.write(tmp_path, ["artifact"]) / "artifact/task.toml"
    text = file.read_text()
    assert opened(file.parent).grading == "trusted"
    for change in (("artifacts_are_data = true", ""), ('"separate"', '"shared"'), ('["/app/out"]', '["/"]'),
                   ('["/app/out"]', '["/app/answer.txt"]'), ('["/app/out"]', '["/app"]'),
                   ('["/app/out"]', '["/data/x.json"]'), ('["/app/out"]', '["/data", "/root"]')):  # fmt: skip
        file.write_text(text.replace(*change))
        assert opened(file.parent).grading == "untrusted"


def test_a_dockerfile_step_by_step() -> None:
    build = read(
        "# a comment\nARG TAG=3\nFROM --platform=linux/amd64 python:${TAG} AS base\n"
        "ENV A=1 B='x y' C=${A:-}\nENV D one two\n"
        "WORKDIR /srv\nWORKDIR app\nCOPY --chown=1:1 a.txt b.txt ./in/\nRUN --mount=type=cache,target=/x \\\n# why\n"
        '  make all\nCMD ["bash"]\nRUN ["echo", "a b"]\nUSER root\n'
    )
    assert (build.image, build.workdir, build.env) == (
        "python:3", "/srv/app", {"A": "1", "B": "x y", "C": "", "D": "one two"},
    )  # fmt: skip
    copy, make, echo = build.steps
    assert copy == Copy(8, ("a.txt", "b.txt"), "/srv/app/in", True)
    assert isinstance(make, Run) and (make.line, make.command.split()) == (9, ["make", "all"])
    assert isinstance(echo, Run) and echo.command == "echo 'a b'" and dict(echo.env)["B"] == "x y"


def test_an_images_own_path_stays_and_modes_are_carried(tmp_path: Path) -> None:
    build = read(
        'FROM a\nSHELL ["/bin/sh", "-c"]\nENV PATH=/opt/venv/bin:$PATH\nENV PATH=$HOME/bin:${PATH}\n'
        "COPY --chmod=0600 a /a\n"
    )
    assert build.env == {"PATH": f"/root/bin:/opt/venv/bin:{BASE_ENV['PATH']}"}
    copy = build.steps[0]
    assert isinstance(copy, Copy) and copy.mode == 0o600
    folder = harbor_tasks.write(tmp_path, ["tool"]) / "tool"
    assert [mode for *_, mode in opened(folder).copied(Copy(1, ("tool.py",), "/a", False, 0o600)).entries] == [0o600]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM a\nENV A=$GOPATH/x", "line 2: $GOPATH/x: neither ARG nor ENV"),
        ("FROM a\nENV A=${B:+c}", "${B:+c}: neither"),
        ("FROM a\nCOPY --chmod=u+x a b", "three octal digits"), ('FROM a\nSHELL ["bash", "-c"]', "by /bin/sh alone"),
        ("RUN x", "line 1: RUN before FROM"), ("", "it has no FROM"), ("FROM a\nFROM b", "several stages"),
        ("FROM scratch", "there is no shell"), ("FROM a\nCOPY --from=b /x /y", "COPY --from=b is not supported"),
        ("FROM a\nADD https://x.org/y /y", "there is no network"),
        ("FROM a\nADD x.tar.gz /y", "archives are not unpacked"),
        ("FROM a\nUSER me", "one user, root"), ("FROM a\nONBUILD RUN x", "ONBUILD is not supported"),
        ("FROM a\nRUN <<EOF\nx\nEOF", "a here-document is not supported"),
        ("FROM a\nCOPY x", "sources and a destination"),
        ("FROM a\nHEALTHCHECK CMD x", "HEALTHCHECK is not supported"), ("FROM a\nRUN a \\", "in the middle"),
        ("FROM a\nRUN --mount=type=secret,id=x y", "is not supported"), ("FROM a\nENV A=1 B", "expected NAME=value"),
    ],
)  # fmt: skip
def test_a_dockerfile_that_cannot_be_followed_says_where(text: str, said: str) -> None:
    with pytest.raises(DockerfileError) as caught:
        read(text)
    assert said in str(caught.value)


def test_canaries_run_to_their_end_and_fail() -> None:
    source = (
        b"import pytest\nseen = []\ndef helper():\n    return 1\nclass TestA:\n    def test_m(self):\n        return "
        b"seen.append('m')\n@pytest.mark.parametrize('x', [1])\ndef test_f(x):\n    seen.append('f')\n    return\n"
    )
    changed = canaries("pytest /tests", {"/tests/test_a.py": source, "/tests/tool.py": source, "/tests/data": b"x"})
    assert set(changed) == {"/tests/test_a.py"}
    names: dict[str, Any] = {}
    exec(changed["/tests/test_a.py"], names)
    for call in (names["TestA"]().test_m, lambda: names["test_f"](1)):
        with pytest.raises(AssertionError, match="made to fail"):
            call()
    assert names["seen"] == ["m", "f"] and names["helper"]() == 1
    assert canaries("bash /tests/check.sh", {"/tests/test_a.py": source}) == {}, "nothing runs it"
    assert canaries("#!/bin/bash\n  # no pytest of test_a.py\nbash /tests/check.sh", {"/tests/test_a.py": source}) == {}
    assert set(canaries("python3 /tests/check.py", {"/tests/check.py": source})) == {"/tests/check.py"}
    assert canaries("pytest", {"/tests/test_a.py": b"def (", "/tests/test_b.py": b"x = 1"}) == {}


def test_what_hangs_is_cut_off_before_the_budget_is() -> None:
    harbor, imaged = (inspect.signature(one).parameters for one in (HarborTask, ImagedSweTask))
    assert 2 * harbor["verify_s"].default < Budget().eval_s and imaged["test_s"].default < Budget().eval_s
    assert (
        f"verify_s: {harbor['verify_s'].default}" in (Path(__file__).parents[3] / "conf/task/harbor.yaml").read_text()
    )


@pytest.mark.parametrize("options", [{}, {"path": "x", "limit": -1}, {"path": "x", "verify_s": 0}])
def test_bad_options_are_refused_by_name(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match=r"task\.(path|limit|options\.verify_s)"):
        HarborTask(**options)
    with pytest.raises(TaskDataError, match="no directory in it has a task"):
        list(HarborTask(str(tmp_path)).rows())
