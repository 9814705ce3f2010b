"""Runs hidden tests inside a sandbox and reports each outcome; its text is sent there, nothing here imports it.

It is run by workflows/grading/bootstrap.py, so no site directory, no variable and no file of the workspace has a say
before pytest is loaded from the layer and the hidden tests are compiled. Their code is made before any code of the
project runs: every expected test ends with a check on numbers, which holds where the test counts and does not in a
canary. Until then both do the same, so that a canary leaves behind what the test would have left, and on disk they are
the same: a runner that a project has patched, or a report that it forges, says "passed" of canaries too. Needs
Python 3.8 in the sandbox.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import inspect
import os
import random
import site
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from workflows.tasks.swe.equality import Equality, Look

# -- the tests' code ---------------------------------------------------------------------------------------------------


def functions(tree: Any) -> Iterator[Any]:
    """Every function of a module or of a class in it, nested classes too."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from functions(node)
            for other in getattr(node, "orelse", []):
                if isinstance(other, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield other


def yields(function: Any) -> bool:
    """Whether a function is a generator, which pytest does not take as a test; functions inside it do not matter."""
    inner: list[Any] = list(function.body)
    while inner:
        node = inner.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            inner.extend(ast.iter_child_nodes(node))
    return False


def numbers(dice: random.Random, *, holds: bool) -> tuple[int, int, int, int]:
    """a, b, m and v, of which a * b % m == v holds or does not."""
    a, b, m = dice.randrange(10**3, 10**6), dice.randrange(10**3, 10**6), dice.randrange(10**2, 10**4)
    value = a * b % m
    return a, b, m, value if holds else (value + dice.randrange(1, m)) % m


def ending(a: int, b: int, m: int, value: int) -> Callable[[Any], Any]:
    """A decorator: the function does what it does, and then fails unless the numbers agree.

    It fails outside of the test's own frame, so that no traceback keeps alive what the test has made.
    """

    def decorate(function: Any) -> Any:
        async def ended_async(*args: Any, **kwargs: Any) -> Any:
            result = await function(*args, **kwargs)
            assert a * b % m == value
            return result

        def ended(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            assert a * b % m == value
            return result

        return functools.wraps(function)(ended_async if inspect.iscoroutinefunction(function) else ended)

    return decorate


def compiled(
    source: bytes, path: str, canaries: dict[str, bool], dice: random.Random, look: str, end: str
) -> tuple[types.CodeType, set[str]]:
    """A test module's code, and the names of the tests in it that were given an ending.

    Args:
        source: of the module.
        path: of its file.
        canaries: the expected tests' function names, and whether each is a canary.
        dice: draws numbers.
        look: the name by which `Look` is found.
        end: the name by which `ending` is found.
    """
    tree = ast.parse(source, path)
    changed = set()
    for function in functions(tree):
        if function.name not in canaries or yields(function):
            continue
        changed.add(function.name)
        given: list[ast.expr] = [ast.Constant(number) for number in numbers(dice, holds=not canaries[function.name])]
        call = ast.Call(func=ast.Name(end, ast.Load()), args=given, keywords=[])
        for node in ast.walk(call):
            ast.copy_location(node, function)
        function.decorator_list.append(call)
    tree = ast.fix_missing_locations(Equality(look).visit(tree))
    return compile(tree, path, "exec", dont_inherit=True), changed


class Loader(importlib.machinery.SourceFileLoader):
    """Gives a test module the code that was made for it."""

    code: types.CodeType | None = None

    def get_code(self, fullname: str) -> types.CodeType | None:
        """See importlib."""
        return self.code


class Finder:
    """Finds the test modules whose code was made here."""

    def __init__(self, codes: dict[str, types.CodeType]) -> None:
        self._codes = codes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """See importlib."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin not in self._codes:
            return None
        loader = Loader(spec.name, spec.origin)
        loader.code = self._codes[spec.origin]
        spec.loader = loader
        return spec


# -- the runner --------------------------------------------------------------------------------------------------------

WATCHED = (
    "_pytest.runner", "_pytest.reports", "_pytest.python", "_pytest.main", "_pytest.unittest", "_pytest.skipping",
    "_pytest.outcomes", "pluggy._callers", "pluggy._hooks", "pluggy._manager", "unittest.case",
)  # fmt: skip


def state_of_runner(own: Sequence[type]) -> dict[str, tuple[Any, Any]]:
    """What pytest is made of: each function and method of the modules above, by name, with its code."""
    found: dict[str, tuple[Any, Any]] = {}
    places: list[tuple[str, Any]] = [(name, vars(sys.modules[name])) for name in WATCHED if name in sys.modules]
    places += [(kind.__name__, vars(kind)) for kind in own]
    while places:
        where, names = places.pop()
        for name, value in list(names.items()):
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if isinstance(value, types.FunctionType):
                found[where + "." + name] = (value, value.__code__)
            elif isinstance(value, type) and value.__module__ == where:
                places.append((where + "." + name, vars(value)))
    import builtins

    for name, value in vars(builtins).items():
        if isinstance(value, types.BuiltinFunctionType):
            found["builtins." + name] = (value, None)
    return found


class Recorder:
    """A pytest plugin that tells what could not be collected and how each phase of each test ended."""

    def __init__(self, tell: Callable[[Any], None], finder: Finder) -> None:
        self._tell, self._finder = tell, finder
        self._process = os.getpid()

    def _say(self, record: dict[str, Any]) -> None:
        """One record; a forked copy of this process says nothing."""
        if os.getpid() == self._process:
            self._tell(record)

    def pytest_configure(self, config: Any) -> None:
        """Before pytest's own import hook, which would rewrite the tests from their files."""
        sys.meta_path.insert(0, self._finder)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported has no tests."""
        if report.failed:
            self._say({"broken": report.nodeid, "text": str(report.longrepr)[-300:]})

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Setup, call and teardown of one test."""
        outcome = "xfail" if hasattr(report, "wasxfail") else report.outcome
        self._say({"id": report.nodeid, "when": report.when, "outcome": outcome})


def be_installed(prefix: str, packages: str, skip: str) -> None:
    """What the `site` module does at a usual start, without the .pth file that names the project: its turn is later."""
    sys.prefix = sys.exec_prefix = prefix
    sys.path.append(packages)
    for name in sorted(os.listdir(packages)):  # noqa: PTH208 - before much is imported
        if name.endswith(".pth") and name != skip:
            site.addpackage(packages, name, None)
    site.setquit()
    site.setcopyright()
    site.sethelper()


def plugins(directory: str) -> Iterator[str]:
    """The pytest plugins of the layer's own packages; nothing that a workspace installs is among them."""
    from importlib import metadata

    for distribution in metadata.distributions(path=[directory]):
        for point in distribution.entry_points:
            if point.group == "pytest11":
                yield point.value.partition(":")[0]


def main(given: dict[str, Any], tell: Callable[[Any], None]) -> None:
    """Run the tests, tell what happened, and end without what a project left for the exit."""
    be_installed(given["prefix"], given["site"], given["pth"])
    import builtins

    import pytest

    dice = random.Random(given["seed"])  # noqa: S311 - the seed comes from a cryptographic source
    codes: dict[str, types.CodeType] = {}
    changed: dict[str, list[str]] = {}
    for path, (text, canaries) in given["tests"].items():
        look, end = f"look_{dice.getrandbits(60):x}", f"end_{dice.getrandbits(60):x}"
        setattr(builtins, look, Look("ANY" in text))
        setattr(builtins, end, ending)
        full = f"{given['root']}/{path}"
        try:
            codes[full], found = compiled(text.encode("latin-1"), full, canaries, dice, look, end)
        except (SyntaxError, ValueError) as error:
            tell({"unreadable": path, "text": str(error)})
            return
        changed[path] = sorted(found)
    tell({"changed": changed})
    options = [
        "-q",
        "-rN",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "--rootdir",
        given["root"],
        "--color=no",
        "--tb=no",
    ]
    for name in plugins(given["site"]):
        options += ["-p", name]
    arguments = options + list(given["tests"])
    own = (Recorder, Finder, Loader)
    recorder = Recorder(tell, Finder(codes))
    before = state_of_runner(own)
    os.chdir(given["root"])
    sys.path.extend(given["sources"])
    given.clear()
    del dice, codes, changed, canaries
    status = pytest.main(arguments, plugins=[recorder])
    after = state_of_runner(own)
    patched = sorted(name for name, value in before.items() if after.get(name) != value)
    tell({"end": int(status), "patched": patched[:20]})
    os._exit(0)
