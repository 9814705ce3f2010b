"""Runs hidden tests inside a sandbox and reports each outcome; its text is sent there, nothing here imports it.

It is run by workflows/grading/bootstrap.py, so no site directory, no variable and no file of the workspace has a say
before pytest is loaded from the layer and the hidden tests are compiled. Their code is made before any code of the
project runs: every expected test says at its end a number, which is right where the test counts and wrong in a canary.
Until then both do the same, so that a canary leaves behind what the test would have left, and on disk they are
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
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from workflows.tasks.swe.equality import Equality, Look
from workflows.tasks.swe.prying import watch

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


def ending() -> tuple[Callable[[Any], Any], Callable[[int], None]]:
    """A decorator, and what the functions that it is given call where they end: with zero, unless they are canaries.

    The number is in the body, and the check outside of it: a body that was emptied ends nowhere, and no traceback of a
    canary keeps alive what the test has made.
    """
    reached: list[int] = []

    def check(before: int) -> None:
        assert len(reached) > before and reached[-1] == 0

    def decorate(function: Any) -> Any:
        async def ended_async(*args: Any, **kwargs: Any) -> Any:
            before = len(reached)
            result = await function(*args, **kwargs)
            check(before)
            return result

        def ended(*args: Any, **kwargs: Any) -> Any:
            before = len(reached)
            result = function(*args, **kwargs)
            check(before)
            return result

        return functools.wraps(function)(ended_async if inspect.iscoroutinefunction(function) else ended)

    return decorate, reached.append


class Ends(ast.NodeTransformer):
    """Puts a statement before each `return` of a function; functions inside it are left alone."""

    def __init__(self, made: Callable[[ast.AST], ast.stmt]) -> None:
        self._made = made

    def visit_Return(self, node: ast.Return) -> Any:
        """Both."""
        return [self._made(node), node]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        """As it is."""
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        """As it is."""
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        """As it is."""
        return node


def give_ending(function: Any, canary: bool, dice: random.Random) -> None:
    """Let a function say where it ends, by numbers that give zero where it is no canary, and be checked outside."""
    a, b, m, value = numbers(dice, holds=not canary)

    def made(where: ast.AST) -> ast.stmt:
        given = ast.parse(f"{a} * {b} % {m} - {value}", mode="eval").body
        said = ast.Expr(ast.Call(func=ast.Constant(REACH), args=[given], keywords=[]))
        for node in ast.walk(said):
            ast.copy_location(node, where)
        return said

    last = function.body[-1]
    ends = Ends(made)
    visited = [ends.visit(line) for line in function.body]
    function.body = [one for got in visited for one in (got if isinstance(got, list) else [got])]
    function.body.append(made(last))
    function.decorator_list.append(ast.copy_location(ast.Constant(END), function))


REACH, END = "<reach>", "<end>"
"""Constants for which the functions themselves are put into the code: a name could be bound to something else."""


def with_objects(code: types.CodeType, objects: dict[str, Any]) -> types.CodeType:
    """The code with the objects in place of the constants that stand for them, in the functions inside it too."""
    constants = []
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            constants.append(with_objects(value, objects))
        else:
            constants.append(objects.get(value, value) if isinstance(value, str) else value)
    return code.replace(co_consts=tuple(constants))


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code and all that is inside it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from codes_in(value)


def compiled(
    source: bytes, path: str, canaries: dict[str, bool], dice: random.Random, look: Look
) -> tuple[types.CodeType, set[str]]:
    """A test module's code, and the names of the tests in it that were given an ending.

    Args:
        source: of the module.
        path: of its file.
        canaries: the expected tests' function names, and whether each is a canary.
        dice: draws numbers.
        look: what it compares by.
    """
    tree = ast.parse(source, path)
    mark = f"{dice.getrandbits(60):x}"  # so that no text of the tests is taken for one of ours
    changed = set()
    for function in functions(tree):
        if function.name not in canaries or yields(function):
            continue
        changed.add(function.name)
        give_ending(function, canaries[function.name], dice)
    tree = Equality(f"<look {mark}>", f"<within {mark}>").visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in (REACH, END) and isinstance(node.value, str):
            node.value = f"{node.value} {mark}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a constant is called
        code = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
    end, reach = ending()
    objects = {f"<look {mark}>": look, f"<within {mark}>": look.within, f"{END} {mark}": end, f"{REACH} {mark}": reach}
    code = with_objects(code, objects)
    look.trusted.extend(codes_in(code))
    return code, changed


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
    "_pytest.outcomes", "_pytest.raises", "_pytest.python_api", "_pytest.capture", "_pytest.recwarn", "unittest.case",
    "unittest.mock",
)  # fmt: skip


def state_of_runner(own: Sequence[type], looks: Sequence[Look]) -> dict[str, tuple[Any, Any]]:
    """What pytest is made of: each function and method of the modules above, by name, with its code."""
    found: dict[str, tuple[Any, Any]] = {}
    # Of pluggy every module: its releases name them differently.
    # A copy, for other threads import too, without the names that a project has blocked by None.
    loaded = [(name, module) for name, module in list(sys.modules.items()) if module is not None]
    watched = [(name, module) for name, module in loaded if name in WATCHED or name.startswith("pluggy.")]
    places: list[tuple[str, Any]] = [(name, vars(module)) for name, module in watched]
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
    for number, look in enumerate(looks):
        for name in look.__slots__:
            found[f"look.{number}.{name}"] = (id(getattr(look, name)), None)
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
    import pytest

    dice = random.Random(given["seed"])  # noqa: S311 - the seed comes from a cryptographic source
    codes: dict[str, types.CodeType] = {}
    looks: list[Look] = []
    changed: dict[str, list[str]] = {}
    for path, (text, canaries) in given["tests"].items():
        looks.append(Look("ANY" in text))
        full = f"{given['root']}/{path}"
        try:
            codes[full], found = compiled(text.encode("latin-1"), full, canaries, dice, looks[-1])
        except (SyntaxError, ValueError, RecursionError) as error:
            tell({"unreadable": path, "text": str(error)})
            return
        changed[path] = sorted(found)
    tell({"changed": changed})
    options = [
        "-q", "-rN", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir", given["root"], "--color=no", "--tb=no",
        *given["options"],
    ]  # fmt: skip
    for name in plugins(given["site"]):
        options += ["-p", name]
    arguments = options + list(given["tests"])
    own = (Recorder, Finder, Loader, Look)
    names = {name for canaries in given["tests"].values() for name in canaries[1]}
    trusted = (os.path.dirname(os.__file__), given["site"], "<frozen ", "<workflows.")  # noqa: PTH120 - as code says it
    hook = watch(
        lambda line: tell({"pried": line}), trusted=trusted, tests=frozenset(codes), names=names, used=given["used"]
    )
    recorder = Recorder(tell, Finder(codes))
    before = state_of_runner(own, looks)
    os.chdir(given["root"])
    sys.path.extend(given["sources"])
    given.clear()
    del dice, codes, changed, canaries, names
    sys.addaudithook(hook)
    status = pytest.main(arguments, plugins=[recorder])
    after = state_of_runner(own, looks)
    patched = sorted(name for name, value in before.items() if after.get(name) != value)
    tell({"end": int(status), "patched": patched[:20]})
    os._exit(0)
