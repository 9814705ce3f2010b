"""What EVAL takes from the repository as it was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import swe_instance as small
from workflows.tasks.swe import grading, repository


def completed(tree: Path, files: dict[str, str], **changes: Any) -> grading.Tests:
    for name, text in {**small.FILES, **files}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(str(text))

    def read(path: str) -> bytes | None:
        return (tree / path).read_bytes() if (tree / path).is_file() else None

    row = {"task_id": "t", **small.row(**changes)}
    return repository.complete(grading.tests_of(row, read), row, tree, read)


@pytest.mark.parametrize(
    ("files", "kept"),
    [
        ({"pytest.ini": "[pytest]\naddopts = -ra --import-mode=importlib --cov -p mine\n"},
         ["--import-mode=importlib", "-p", "mine"]),
        ({"pyproject.toml": "[tool.pytest.ini_options]\naddopts = ['--strict-config', '-n4', '--import-mode', 'x']\n"},
         ["--strict-config", "--import-mode", "x"]),
        ({"setup.cfg": "[tool:pytest]\naddopts = --doctest-report ndiff -pmine\n"}, ["-pmine"]),
        ({"tox.ini": "[pytest]\naddopts = 'unclosed\n"}, []),
        ({"pytest.ini": "[pytest]\n", "tox.ini": "[pytest]\naddopts = -p x\n"}, []),
    ],
)  # fmt: skip
def test_options_that_say_how_tests_are_found_stay(files: dict[str, str], kept: list[str], tmp_path: Path) -> None:
    assert completed(tmp_path, files).options == kept


def test_on_disk_lies_what_the_agent_has_seen_unless_somebody_reads_it(tmp_path: Path) -> None:
    assert completed(tmp_path, {}).decoys == {small.TESTS: small.SEEN_TESTS.encode()}
    assert completed(tmp_path, {"src/tally/debug.py": "import linecache"}).decoys == {}
    reading = small.HIDDEN_TESTS + "\n\ndef test_text():\n    open(__file__)\n"
    (tmp_path / "src/tally/debug.py").unlink()
    assert completed(tmp_path, {}, test_patch=small.diff(small.TESTS, small.SEEN_TESTS, reading)).decoys == {}


def test_habits_are_those_of_the_repository_and_of_the_solution(tmp_path: Path) -> None:
    assert completed(tmp_path, {}).used == []
    assert completed(tmp_path, {"src/tally/x.py": "sys._getframe()"}).used == ["_getframe"]


def test_helpers_of_a_directory_test_are_the_repositorys_but_for_what_the_solution_changes(tmp_path: Path) -> None:
    files = {"test/helpers.py": "a", "test/data/x.txt": "b", "test/fixed.py": "c\n", "src/test/y.py": "d"}
    hidden = small.diff("test/test_new.py", "", "def test_new():\n    pass\n").replace(
        "--- a/test/test_new.py", "--- /dev/null"
    )
    made = completed(
        tmp_path, files, test_patch=hidden, FAIL_TO_PASS=["test/test_new.py::test_new"], PASS_TO_PASS=[],
        patch=small.diff("test/fixed.py", "c\n", "e\n"),
    )  # fmt: skip
    assert set(made.files) == {"test/test_new.py", "test/helpers.py", "test/data/x.txt"}


def test_what_is_marked_to_fail_may_fail_and_nothing_else(tmp_path: Path) -> None:
    hidden = small.HIDDEN_TESTS + "\n\n@pytest.mark.xfail\ndef test_x():\n    assert 0\n"
    made = completed(
        tmp_path, {}, test_patch=small.diff(small.TESTS, small.SEEN_TESTS, hidden),
        PASS_TO_PASS=[f"{small.TESTS}::test_count", f"{small.TESTS}::test_x"],
    )  # fmt: skip
    assert made.xfail == [f"{small.TESTS}::test_x"]
    names = frozenset({"test_x"})
    for marked, share in ((made.xfail, 1.0), ([], 0.0)):
        tests = grading.Tests([], [f"{small.TESTS}::test_x"], {}, xfail=marked)
        told: list[Any] = [{"changed": {small.TESTS: ["test_x"]}}]
        for when, outcome in (("setup", "passed"), ("call", "xfail"), ("teardown", "passed")):
            told.append({"id": f"{small.TESTS}::test_x", "when": when, "outcome": outcome})
        heard = grading.hear([*told, {"end": 0, "patched": []}], tests)
        assert grading.judge(tests, [(names, heard), (frozenset(), heard)]).parts == {
            "f2p": 1.0, "p2p": share, "canary": 1.0, "format": 1.0,
        }  # fmt: skip
