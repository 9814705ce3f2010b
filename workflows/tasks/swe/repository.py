"""What EVAL takes from the repository as it was given: helpers of the tests, options of pytest, decoys, its habits."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from stages.protocols import Row
from workflows.tasks.swe import patches, project
from workflows.tasks.swe.grading import Tests, file_of, function_of
from workflows.tasks.swe.prying import WORDS

_READS_TESTS: Final = re.compile(
    rb"getsource|findsource|linecache|traceback|extract_stack|doctest|multiprocessing|ProcessPool|subprocess|runpy"
    rb"|__file__|testdir|pytester|inline_run"
)
"""A hidden test with one of these may need its own text on disk."""
_READS_SOURCES: Final = re.compile(rb"getsource|findsource|linecache|executing")
"""A repository with one of these may read the text of its callers."""

_DECOY: Final = b"# The tests that are run here are not on disk.\n"
_HELPERS: Final = "test"
"""The directory of tests of which an agent's version would be believed: `tests` is protected by name."""

_MAX_HELPERS: Final = 2000
_KEPT: Final = re.compile(r"--import-mode(=.*)?|--strict(-markers|-config)?|-p(.+)?")


def complete(tests: Tests, row: Row, tree: Path, read: Callable[[str], bytes | None]) -> Tests:
    """The tests with what else EVAL lays down and says.

    Args:
        tests: as the row has them.
        row: with its private columns.
        tree: the unpacked repository.
        read: a file of it.
    """
    text = b"\n".join(path.read_bytes() for path in sorted(tree.rglob("*.py")) if path.is_file())
    text += row["patch"].encode() + b"".join(content or b"" for content in tests.files.values())
    decoys = {}
    if not _READS_SOURCES.search(text):
        for path in tests.names:
            if not _READS_TESTS.search(tests.files[path] or b""):
                decoys[path] = read(path) or _DECOY
    return msgspec.structs.replace(
        tests, xfail=_marked_xfail(tests), files={**_helpers(tests, row, tree), **tests.files}, decoys=decoys,
        options=options(tree), used=[word for word in WORDS if word.encode() in text],
    )  # fmt: skip


def _helpers(tests: Tests, row: Row, tree: Path) -> dict[str, bytes]:
    """What the expected tests stand beside in a directory `test`, but for what the solution itself changes."""
    tops = set()
    for path in tests.names:
        parts = path.split("/")[:-1]
        if _HELPERS in parts and "tests" not in parts:
            tops.add("/".join(parts[: parts.index(_HELPERS) + 1]))
    solution = set(patches.paths(row["patch"])) if tops else set()
    found = {}
    for top in sorted(tops):
        for file in sorted((tree / top).rglob("*"))[:_MAX_HELPERS]:
            name = str(file.relative_to(tree))
            if file.is_file() and not file.is_symlink() and name not in solution:
                found[name] = file.read_bytes()
    return found


def _marked_xfail(tests: Tests) -> list[str]:
    """Tests of PASS_TO_PASS whose function, class or module in the hidden files speaks of xfail."""
    speaking: dict[str, set[str]] = {}
    for path in tests.names:
        text = (tests.files[path] or b"").decode("utf-8", "replace")
        try:
            tree = ast.parse(text) if "xfail" in text else ast.Module([], [])
        except (SyntaxError, ValueError, RecursionError):  # of a newer Python; none is marked then
            continue
        for node in tree.body:
            speaks = "xfail" in ast.unparse(node)
            if isinstance(node, ast.Assign) and speaks:
                speaking[path] = set(tests.names[path])
            found = [one for one in ast.walk(node) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
            on_class = isinstance(node, ast.ClassDef) and any("xfail" in ast.unparse(d) for d in node.decorator_list)
            names = {one.name for one in found if on_class or "xfail" in ast.unparse(one)} if speaks else set()
            speaking.setdefault(path, set()).update(names)
    return [test for test in tests.pass_to_pass if function_of(test) in speaking.get(file_of(test), ())]


def options(tree: Path) -> list[str]:
    """Those of the repository's `addopts` that say how tests are found and read; the others say what is printed.

    Args:
        tree: the repository, whose configuration files are read in pytest's order.
    """
    for section in (
        project.sections(tree / "pytest.ini").get("pytest"),
        _of_pyproject(project.pyproject(tree)),
        project.sections(tree / "tox.ini").get("pytest"),
        project.sections(tree / "setup.cfg").get("tool:pytest"),
    ):
        if section is not None:
            return _kept(section.get("addopts", ""))
    return []


def _of_pyproject(pyproject: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = pyproject.get("tool", {}).get("pytest", {}).get("ini_options")
    return found if isinstance(found, dict) else None


def _kept(addopts: Any) -> list[str]:
    try:
        words = shlex.split(addopts) if isinstance(addopts, str) else [str(word) for word in addopts]
    except ValueError:  # what pytest would not read either
        return []
    kept: list[str] = []
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if not _KEPT.fullmatch(word):
            continue
        kept.append(word)
        if word in ("-p", "--import-mode") and following:
            kept.append(following)
    return kept
