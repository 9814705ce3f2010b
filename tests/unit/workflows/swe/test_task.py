"""The task's rows, their environments and what of them an agent reads."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from pathlib import Path

import pytest

from sandbox.protocols import Execution, FileEntry
from stages.errors import VerifierError
from stages.protocols import Reward
from stages.trajectory import Trajectory
from tests.support import swe_instance as small
from workflows.errors import TaskDataError
from workflows.tasks.rows import BROKEN
from workflows.tasks.swe import SweTask, project
from workflows.wheels.cache import Lock, Wheel
from workflows.wheels.errors import UnresolvableError
from workflows.wheels.install import Entry


def task(folder: Path, *rows: object, limit: int | None = None) -> SweTask:
    return SweTask(str(small.write(folder, rows or (small.row(),))), limit=limit)  # type: ignore[arg-type]


def test_a_line_that_is_no_row_fails_alone(tmp_path: Path) -> None:
    lines = [
        small.row("a"),
        "{not json",
        small.row("b", patch=None),
        small.row("c", FAIL_TO_PASS="[1]"),
        small.row("e", archive="a\0b"),
        small.row("f", FAIL_TO_PASS="[" * 100_000),
        small.row("d"),
    ]
    rows = list(task(tmp_path, *lines).rows())
    assert [row.get(BROKEN, "whole").rpartition(": ")[2][:20] for row in rows if BROKEN not in row] == ["whole"] * 2
    said = [row[BROKEN] for row in rows if BROKEN in row]
    assert [where.partition(":")[2].partition(":")[0] for where in said] == ["2", "3", "4", "5", "6"]
    assert "patch is missing" in said[1] and "FAIL_TO_PASS" in said[2]


@pytest.mark.parametrize(
    "change",
    [
        {"archive": "other.tar.gz"}, {"requirements": ["pytest<9", "six"]}, {"source_root": ""}, {"version": "2"},
        {"repo": "other/tally"},
    ],
)  # fmt: skip
def test_what_preparing_depends_on_changes_the_environment_and_nothing_else_does(
    change: dict[str, object], tmp_path: Path
) -> None:
    made = task(tmp_path, small.row("a"), small.row("b", patch="", problem_statement="x"), small.row("c", **change))
    keys = [made.environment(row).setup_key for row in made.rows()]
    assert keys[0] == keys[1] != keys[2]


def test_the_key_is_that_of_the_public_columns_and_follows_the_archives_content(tmp_path: Path) -> None:
    made = task(tmp_path)
    (row,) = made.rows()
    public = {name: value for name, value in row.items() if name not in made.private}
    key = made.environment(row).setup_key
    assert made.environment(public).setup_key == key
    small.write_archive(tmp_path / "tally.tar.gz", {**small.FILES, "more": ""})
    assert [made.environment(row).setup_key for row in made.rows()] != [key]


def test_a_row_that_a_trainer_sent_is_prepared_like_one_of_the_file(tmp_path: Path) -> None:
    made = task(tmp_path)
    (row,) = made.rows()
    sent = {name: value for name, value in row.items() if name not in ("archive_sha256", "instance_id")}
    assert made.environment({**sent, "archive": "tally.tar.gz"}) == made.environment(row)


def test_the_prompt_holds_the_issue_and_no_private_column(tmp_path: Path) -> None:
    made = task(tmp_path, small.row(hints_text="look at the sign"))
    (row,) = made.rows()
    public = {name: value for name, value in row.items() if name not in made.private}
    said = json.dumps([message.content for message in made.prompt(public)])
    assert (
        row["problem_statement"] in said and "test_top" not in json.dumps(public) and "sign" not in json.dumps(public)
    )


def test_a_column_that_nobody_knows_is_dropped(tmp_path: Path) -> None:
    (row,) = task(tmp_path, small.row(gold_patch="the solution")).rows()
    assert "gold_patch" not in row and "patch" in row


def test_options_out_of_range_are_refused(tmp_path: Path) -> None:
    for options in ({"path": None}, {"path": "x", "limit": -1}, {"path": "x", "test_s": 0.0}):
        with pytest.raises(TaskDataError, match="task"):
            SweTask(**options)  # type: ignore[arg-type]


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_project_is_known_by_all_its_names(tmp_path: Path) -> None:
    files = {
        "src/py_tally/__init__.py": "", "src/tests/__init__.py": "", "PKG-INFO": "Name: Py.Tally\nVersion: 1.0\n",
        "pyproject.toml": "[project]\nname = 'tally_lib'\n[project.scripts]\ntally = 'py_tally:main'\n",
    }  # fmt: skip
    found = project.read({"repo": "someone/tally", "source_root": "src/"}, tree(tmp_path, files))
    assert found.names == {"py-tally", "tally-lib", "tally"} and found.packages == {"py_tally"}
    assert [script.path for script in project.scripts(found, "/py")] == ["bin/tally"]
    made = project.distribution_files(found)
    assert "Version: 1.0" in made["py_tally-1.0.dist-info/METADATA"]


def test_a_resolution_that_brings_the_project_is_refused(tmp_path: Path) -> None:
    found = project.read({"repo": "someone/tally"}, tree(tmp_path, {"tally/__init__.py": ""}))
    lock = Lock(1, ["tool"], {}, [Wheel("tool", "1", "tool-1.whl", "0", 1), Wheel("Tally", "2", "tally-2.whl", "0", 1)])
    with pytest.raises(UnresolvableError, match="own distribution, Tally 2"):
        project.refuse_own(found, lock)
    with pytest.raises(UnresolvableError, match="own package tally"):
        project.refuse_packages(found, Entry("lib/tally/x.py", b""), "lib", "fork-2.whl")
    project.refuse_packages(found, Entry("lib/tally_more/x.py", b""), "lib", "more-2.whl")


class Guest:
    """A sandbox whose trusted program reports what a test wants; it says what was asked of it."""

    def __init__(self, records: list[object]) -> None:
        self.asked: list[str] = []
        self.records = records
        self.files = self

    async def list(self, path: str) -> tuple[FileEntry, ...]:
        return (FileEntry("python3.11", "directory", 0),)

    async def write(self, path: str, data: bytes | str) -> None:
        self.asked.append("write")

    async def reset(self) -> None:
        self.asked.append("reset")

    async def execute(self, argv: object, *, input: bytes, **options: object) -> Execution:  # noqa: A002
        self.asked.append("run")
        key, lines = bytes.fromhex(json.loads(input)["key"]), []
        for number, record in enumerate([{"hello": 1}, *self.records]):
            body = json.dumps(record).encode()
            lines.append(hmac.new(key, b"%d:" % number + body, hashlib.sha256).hexdigest().encode() + b" " + body)
        return Execution(0, b"\n".join(lines), b"No module named 'pytest'\n", 0.1)


def verified(folder: Path, guest: Guest) -> Reward:
    made = task(folder)
    (row,) = made.rows()
    return asyncio.run(made.verify(guest, row, Trajectory([], [])))  # type: ignore[arg-type]


def test_the_second_run_sees_nothing_that_the_first_has_changed(tmp_path: Path) -> None:
    guest = Guest([{"changed": {small.TESTS: ["test_top"]}}])
    assert verified(tmp_path, guest).value == 0.0
    assert guest.asked == ["write", "run", "reset", "write", "run"]


def test_what_ends_before_any_code_of_the_project_is_no_reward(tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match=r"pytest did not begin.*No module named 'pytest'") as raised:
        verified(tmp_path, Guest([]))
    assert raised.value.detail["final"] is True
