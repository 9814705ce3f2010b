"""EVAL of task=swe: which hidden files are laid down, what is run, and how the reports of two runs make a reward.

The tests run twice, in fresh processes. For every test function it is drawn in which of the two it counts; in the other
it is a canary, changed so that it must not pass (workflows/tasks/swe/guest.py). So neither run is the one that counts:
a runner that was patched, or a report that was forged, in one of them or in both, says "passed" of canaries.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final

import msgspec

from stages.errors import VerifierError
from stages.protocols import Reward, Row
from workflows.errors import TaskDataError
from workflows.tasks.swe import columns, patches, setting
from workflows.wheels.install import site_packages

GUEST: Final = ("workflows.tasks.swe.equality", "workflows.tasks.swe.prying", "workflows.tasks.swe.guest")

PROTECTED: Final = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "setup.py",
    "pyproject.toml", "__pycache__", "*.pyc", "*.pyo", "*.pth", "sitecustomize.py", "usercustomize.py", ".git",
    "*.egg-info", "*.dist-info", "*.egg-link", "test_*.py", "*_test.py", "tests", ".pytest_cache", ".coveragerc",
)  # fmt: skip
"""Names that EVAL takes from the layer at any depth, whatever an agent made of them."""

GUEST_ENV: Final = {
    "PATH": f"{setting.ENV}/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",  # noqa: S108 - inside the sandbox
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}


Canaries = frozenset[str]
"""Names of test functions; functions of one name in several files are canaries together, as one may inherit another."""

RUNS: Final = 2
_LONGEST_ID: Final = 4000


class Heard(msgspec.Struct):
    """What one run reported.

    Args:
        outcomes: of each test, by the worst of its phases: passed only where all three passed.
        changed: names of the test functions, by file, that were found and given their ending; None where the run did
            not come so far, which is before any code of the project.
        broken: files that could not be collected, with the reason's end.
        ended: the run came to its end.
        patched: parts of pytest that were not what they had been, and reaches of the project for the tests.
        unreadable: hidden files that are no Python.
    """

    outcomes: dict[str, str] = {}
    changed: dict[str, list[str]] | None = None
    broken: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    ended: bool = False
    patched: list[str] = []


class Tests(msgspec.Struct, frozen=True):
    """What a row expects, and the files that are laid down for it."""

    fail_to_pass: list[str]
    pass_to_pass: list[str]
    files: dict[str, bytes | None]
    """Whole files by their path in the repository; None is deleted."""
    decoys: dict[str, bytes] = {}
    """What lies on disk in place of test files, whose code is made from what is sent."""
    used: list[str] = []
    """Words of the repository that excuse the same in what an agent leaves: see prying.py."""
    options: list[str] = []
    """Of pytest, as the repository configures them."""
    xfail: list[str] = []
    """Expected tests that may fail as they are marked to, which counts as a pass."""

    @property
    def expected(self) -> list[str]:
        """All ids."""
        return [*self.fail_to_pass, *self.pass_to_pass]

    @property
    def names(self) -> dict[str, list[str]]:
        """Function names of the expected tests, by file, in the order of the files."""
        found: dict[str, set[str]] = {}
        for test in self.expected:
            found.setdefault(file_of(test), set()).add(function_of(test))
        return {path: sorted(found[path]) for path in sorted(found)}


def file_of(test: str) -> str:
    """The file of a test id."""
    return test.partition("::")[0]


def function_of(test: str) -> str:
    """The function of a test id, without class and parameters."""
    return test.partition("[")[0].rpartition("::")[2].partition(" ")[0]


def tests_of(row: Row, read: Callable[[str], bytes | None]) -> Tests:
    """The hidden tests as whole files, made from the repository as it was given.

    Args:
        row: with its private columns.
        read: a file of the given repository.

    Raises:
        VerifierError: final: the patch does not fit, or an expected test is in none of the files.
    """
    try:
        files = patches.apply(row["test_patch"], read)
    except TaskDataError as error:
        raise VerifierError(f"{row['task_id']}: test_patch: {error}", final=True) from error
    tests = Tests(columns.texts(row["FAIL_TO_PASS"]), columns.texts(row["PASS_TO_PASS"]), files)
    for path, names in tests.names.items():
        content = files[path] if path in files else read(path)
        if content is None or not _inside(path):
            raise VerifierError(f"{row['task_id']}: expected tests are in {path}, which does not exist", final=True)
        files.setdefault(path, content)
        missing = [name for name in names if not re.search(rb"\bdef\s+%s\b" % re.escape(name.encode()), content)]
        if missing and not _inherits(content):
            raise VerifierError(f"{row['task_id']}: no test {path}::{missing[0]} exists", final=True)
    return tests


def _inside(path: str) -> bool:
    return not path.startswith("/") and ".." not in path.split("/") and path != ""


def _inherits(content: bytes) -> bool:
    """Whether tests may come from another file: by a base class that is imported, or by a star."""
    return (
        bool(re.search(rb"^\s*class\s+\w+\((?!object\b|\w*TestCase\b)\w", content, re.MULTILINE))
        or b"import *" in content
    )


def draw(tests: Tests) -> tuple[Canaries, Canaries]:
    """The canaries of the two runs: each test function is one in one of them."""
    functions = sorted({name for names in tests.names.values() for name in names})
    first = frozenset(name for name in functions if secrets.randbits(1))
    return first, frozenset(functions) - first


def assignment(row: Row, tests: Tests, canaries: Canaries, version: str) -> dict[str, Any]:
    """What the guest is given for one run."""
    source = f"{setting.ROOT}/{row.get('source_root', '')}".rstrip("/")
    files = {
        path: [(tests.files[path] or b"").decode("latin-1"), {name: name in canaries for name in names}]
        for path, names in tests.names.items()
    }
    return {
        "seed": secrets.randbits(64), "root": setting.ROOT, "sources": [source], "tests": files, "used": tests.used,
        "options": tests.options, "prefix": setting.ENV, "site": f"{setting.ENV}/{site_packages(version)}",
        "pth": setting.SOURCE_PTH,
    }  # fmt: skip


def hear(records: Sequence[Any], tests: Tests) -> Heard:
    """Sort out what the guest told of these tests; a record of another shape is nothing."""
    heard = Heard({}, None, {}, {}, patched=[])
    expected = frozenset(tests.expected)
    for record in records:
        if isinstance(record, dict):
            _take(heard, record, expected)
    return heard


def _take(heard: Heard, event: Mapping[str, Any], expected: Set[str]) -> None:
    """What comes after `changed` may come from the project; what comes before cannot."""
    if "id" in event:
        if _is_meant(str(event["id"]), expected):
            _take_outcome(heard.outcomes, event)
    elif heard.changed is None and isinstance(event.get("changed"), dict):
        heard.changed = event["changed"]
    elif "pried" in event:
        heard.patched.append(str(event["pried"]))
    elif "broken" in event:
        heard.broken[str(event["broken"])] = str(event.get("text", ""))
    elif "unreadable" in event and heard.changed is None:
        heard.unreadable[str(event["unreadable"])] = str(event.get("text", ""))
    elif "end" in event:
        heard.ended = True
        patched = event.get("patched")
        heard.patched += [str(name) for name in patched] if isinstance(patched, list) else ["end"]


def _is_meant(told: str, expected: Set[str]) -> bool:
    """Whether an id that was told is expected, or begins with one that is and a blank: see `seen`."""
    if told in expected or len(told) > _LONGEST_ID:
        return told in expected
    return any(told[: blank.start()] in expected for blank in re.finditer(" ", told))


def _take_outcome(outcomes: dict[str, str], event: Mapping[str, Any]) -> None:
    """Setup passed, call passed, teardown passed, in this order and once each, is a pass; all else is not."""
    test, when, outcome = str(event["id"]), event.get("when"), event.get("outcome")
    before = {"setup": None, "call": "setup", "teardown": "call"}.get(str(when), "never")
    if outcome == "passed" and outcomes.get(test) == before:
        outcomes[test] = {"setup": "setup", "call": "call", "teardown": "passed"}[str(when)]
    elif outcome == "xfail" and when == "call" and outcomes.get(test) == before:
        outcomes[test] = "xfail-call"
    elif outcome == "passed" and when == "teardown" and outcomes.get(test) == "xfail-call":
        outcomes[test] = "xfail"
    else:
        outcomes[test] = "failed"


def seen(test: str, outcomes: Mapping[str, str]) -> list[str]:
    """The ids of a run that an expected id means.

    One that was not seen stands for all that begin with it and a blank: tools that read pytest's summary cut an id
    there, or before " - ".
    """
    return [test] if test in outcomes else [other for other in outcomes if other.startswith(f"{test} ")]


def passed(test: str, outcomes: Mapping[str, str], *, xfail: bool = False) -> bool:
    """Whether an expected test was seen, and passed; or failed as it is marked to, where that is a pass."""
    meant = seen(test, outcomes)
    good = ("passed", "xfail") if xfail else ("passed",)
    return bool(meant) and all(outcomes[other] in good for other in meant)


def judge(tests: Tests, runs: Sequence[tuple[Canaries, Heard]]) -> Reward:
    """1.0 where every expected test passed where it counted, and every canary was seen not to pass.

    `f2p` and `p2p` are shares of the ids that passed; `canary` is 1.0 where nothing points to a cheat; `format` is 1.0
    where what the agent left could be tested at all: each hidden file was imported, and both runs came to their end.

    Args:
        tests: what is expected.
        runs: of each run its canaries and what was heard of it; one that was not made is missing.
    """
    marked = frozenset(tests.xfail)
    results = {test: _counted(test, runs, xfail=test in marked) for test in tests.expected}
    f2p, p2p = _share(tests.fail_to_pass, results), _share(tests.pass_to_pass, results)
    honest = not any(heard.patched for _, heard in runs) and all(
        _failed_as_canary(test, canaries, heard, must_be_seen=results[test])
        for test in tests.expected
        for canaries, heard in runs
    )
    whole = len(runs) == RUNS and all(heard.ended for _, heard in runs)
    tested = whole and not any(heard.broken for _, heard in runs)
    parts = {"f2p": f2p, "p2p": p2p, "canary": float(honest), "format": float(tested)}
    return Reward(float(honest and whole and f2p == p2p == 1.0), parts)


def _counted(test: str, runs: Sequence[tuple[Canaries, Heard]], *, xfail: bool = False) -> bool:
    """Whether a test passed in every run in which it was no canary."""
    name = function_of(test)
    counting = [heard for names, heard in runs if name not in names or not _was_changed(name, heard)]
    return bool(counting) and all(passed(test, heard.outcomes, xfail=xfail) for heard in counting)


def _was_changed(name: str, heard: Heard) -> bool:
    """Whether a function of that name was given its ending in any file; one that is inherited may come from there."""
    return any(name in names for names in (heard.changed or {}).values())


def _failed_as_canary(test: str, canaries: Canaries, heard: Heard, *, must_be_seen: bool) -> bool:
    """Of a test whose own file holds its function it is certain that it was a canary."""
    name = function_of(test)
    if name not in canaries or name not in (heard.changed or {}).get(file_of(test), ()):
        return True
    meant = seen(test, heard.outcomes)
    return (bool(meant) or not must_be_seen) and all(heard.outcomes[other] != "passed" for other in meant)


def _share(tests: Sequence[str], results: Mapping[str, bool]) -> float:
    return sum(results[test] for test in tests) / len(tests) if tests else 1.0
