"""Rows of SWE-bench, SWE-Gym and R2E-Gym as what an image of theirs runs: image, command, parser, tests. Pure.

Sources: SWE-bench's evaluation harness (test commands and log parsers by repository; `sweb.eval` images with the
repository in /testbed and a conda environment `testbed`); SWE-Gym's fork of it; R2E-Gym's repository (run_tests.sh and
the hidden tests in /root and /r2e_tests of its images, expected statuses in `expected_output_json`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from sandbox.images.names import instance_image
from workflows.grading.logs.statuses import PASSED
from workflows.tasks.swe import columns as own

ROOT: Final = "/testbed"
_KEPT: Final = "/root"
R2E_PROTECTED: Final = (".venv", "run_tests.sh", "r2e_tests")
"""Names in an R2E-Gym repository that its tests are run by."""
_CONDA: Final = "source /opt/miniconda3/bin/activate && conda activate testbed"
_PYTEST: Final = "pytest -rA"
_DJANGO: Final = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
_COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "django/django": (_DJANGO, "django"),
    "sphinx-doc/sphinx": ("tox --current-env -epy39 -v --", "pytest"),
    "astropy/astropy": ("pytest -rA -vv -o console_output_style=classic --tb=no", "pytest"),
    "mwaskom/seaborn": ("pytest --no-header -rA", "pytest"),
    "getmoto/moto": ("pytest -n0 -rA", "pytest"), "python/mypy": ("pytest -n0 -rA", "pytest"),
    "iterative/dvc": ("pytest -rA", "pytest"), "pandas-dev/pandas": ("pytest -rA --tb=long", "pytest"),
    "pydantic/pydantic": ("pytest -rA --tb=short -vv -o console_output_style=classic --no-header", "pytest"),
    "dask/dask": ("pytest -n0 -rA --color=no", "pytest"), "modin-project/modin": ("pytest -n0 -rA", "pytest"),
    "conan-io/conan": ("pytest -n0 -rA", "pytest"),
}  # fmt: skip
"""Test command and log parser by repository; all others run `pytest -rA`."""
_NO_PARSER: Final = {"sympy/sympy": "bin/test, whose log is not one that is read here"}
_DATA_SETS: Final = {"swe-bench": "swebench", "swe-gym": "swegym"}
NAMES: Final = (*_DATA_SETS, "r2e-gym")
_FILE: Final = re.compile(r"^diff --git a/(\S+) b/(\S+)$", re.MULTILINE)
_NO_TESTS: Final = (
    ".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml", ".rst", ".html", ".css",
)  # fmt: skip
"""Files of a test patch that are data of tests, as SWE-bench's harness has them."""


@dataclass(frozen=True)
class Instance:
    """What is run for a row, in its image.

    Args:
        image: a name of the store.
        command: for bash, in `ROOT`.
        parser: one of workflows.grading.logs.PARSERS.
        expected: the status that each test must have.
        files: that the hidden tests are in; the agent's are not taken.
    """

    image: str
    command: str
    parser: str
    expected: dict[str, str]
    files: tuple[str, ...]


def wrong(data_set: str, row: Mapping[str, Any]) -> str:
    """What keeps a line of that data set from being a row; empty where nothing does."""
    if data_set == "r2e-gym":
        return _wrong_texts(row, ("docker_image", "problem_statement", "expected_output_json")) or _wrong_r2e(row)
    if row.get("image_assets"):
        return "it is a row of SWE-bench Multimodal (image_assets), which is not supported: agents are given text alone"
    said = _wrong_texts(row, ("instance_id", "repo", "problem_statement", "patch", "test_patch"))
    if said:
        return said
    if row["repo"] in _NO_PARSER:
        return f"{row['repo']} is tested by {_NO_PARSER[row['repo']]}"
    try:
        lists = own.texts(row.get("FAIL_TO_PASS")), own.texts(row.get("PASS_TO_PASS"))
    except (ValueError, RecursionError) as error:
        return f"FAIL_TO_PASS or PASS_TO_PASS: {error}"
    if not lists[0]:
        return "FAIL_TO_PASS is empty: nothing would show that the issue is mended"
    return "" if _files(row["test_patch"]) else "test_patch changes no file"


def instance(data_set: str, row: Mapping[str, Any], arch: str = "x86_64") -> Instance:
    """What is run for a row that `wrong` finds nothing in."""
    if data_set == "r2e-gym":
        wanted = {name: _status(text) for name, text in json.loads(row["expected_output_json"]).items()}
        link = f"rm -rf {ROOT}/r2e_tests; ln -s {_KEPT}/r2e_tests {ROOT}/r2e_tests"
        command = f"export PATH={ROOT}/.venv/bin:$PATH; {link}; bash {_KEPT}/run_tests.sh"
        return Instance(row["docker_image"], command, "pytest", wanted, ())
    test, parser = _COMMANDS.get(row["repo"], (_PYTEST, "pytest"))
    files = _files(row["test_patch"])
    expected = dict.fromkeys([*own.texts(row["FAIL_TO_PASS"]), *own.texts(row["PASS_TO_PASS"])], PASSED)
    command = f"{_CONDA} && {test} {' '.join(_directives(row['repo'], files))}"
    return Instance(image(data_set, row["instance_id"], arch), command, parser, expected, files)


def r2e_moved(root: str = ROOT, tests: str = "/r2e_tests", kept: str = _KEPT) -> str:
    """A script that moves an R2E-Gym image's run script and tests out of the repository, as its own harness does."""
    return (
        f"cd {shlex.quote(root)} || exit 1; for one in run_tests.sh r2e_tests {shlex.quote(tests)}; do "
        f'if [ -e "$one" ] && [ ! -L "$one" ]; then mv "$one" {shlex.quote(kept)}/; fi; done; '
        f"[ -f {shlex.quote(kept)}/run_tests.sh ] && [ -d {shlex.quote(kept)}/r2e_tests ]"
    )


def image(data_set: str, instance_id: str, arch: str = "x86_64") -> str:
    """The name of a SWE-bench or SWE-Gym instance's image."""
    return instance_image(_DATA_SETS[data_set], instance_id, arch)


def agreement(wanted: Mapping[str, str], found: Mapping[str, str]) -> float:
    """The share of tests with the status that they must have.

    A name without its parameters' end stands for what begins so: SWE-bench's lists cut some at a blank. A name without
    `::` is also looked for as R2E-Gym writes names: without the file, its parts joined by dots.
    """
    cut: dict[str, set[str]] = {}
    dotted: dict[str, set[str]] = {}
    for full, status in found.items():
        cut.setdefault(full.partition(" ")[0], set()).add(status)
        dotted.setdefault(_dotted(".".join(full.split("::")[1:])), set()).add(status)
    met = 0
    for name, status in wanted.items():
        if name in found:
            met += found[name] == status
        elif "::" not in name:
            met += dotted.get(_dotted(name)) == {status}
        elif "[" in name and not name.endswith("]"):
            met += cut.get(name) == {status}
    return met / len(wanted) if wanted else 0.0


def _dotted(name: str) -> str:
    """A test as R2E-Gym's parser names it: without its file, and up to what it takes for a reason."""
    return name.partition(" - ")[0]


def _status(text: Any) -> str:
    return {"PASSED": "passed", "FAILED": "failed", "ERROR": "error", "SKIPPED": "skipped"}.get(str(text), str(text))


def _files(patch: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(new for _, new in _FILE.findall(patch)))


def _directives(repo: str, files: tuple[str, ...]) -> list[str]:
    """What a runner is told to run: files, and modules for Django's."""
    run = [path for path in files if not path.endswith(_NO_TESTS)]
    if repo != "django/django":
        return run
    return [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in run]


def _wrong_texts(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    for name in names:
        if not isinstance(row.get(name), str) or not row[name]:
            return f"column {name} is missing, or no text"
    return ""


def _wrong_r2e(row: Mapping[str, Any]) -> str:
    try:
        wanted = msgspec.json.decode(row["expected_output_json"], type=dict[str, str])
    except (msgspec.DecodeError, RecursionError) as error:
        return f"expected_output_json: {error}"
    return "" if wanted else "expected_output_json is empty"
