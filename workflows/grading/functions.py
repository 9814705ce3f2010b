"""Grades a function by a test that calls it: the test runs here, the function in another process; sent into sandboxes.

The test's values are compared in this process, which never loads the solution: what comes back of each call are values
of exact built-in types, so no `__eq__` of the solution's has a say, and no exit, atexit or patched module of it either.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workflows.grading import bounds, candidate, values

_CHILD = """
import os, sys
take, give = (os.dup(int(word)) for word in sys.argv[1:3])
for word in sys.argv[1:3]:
    os.close(int(word))
text, left = b"", int(sys.argv[3])
while len(text) < left:
    text += os.read(take, left - len(text)) or sys.exit(1)
exec(text.decode())
"""
"""Takes its program from the first pipe, and none of its pipes is inherited by what it starts."""
LOADING = 3.0
"""Times of a call that the start and the loading may take."""
_BY_VALUE = (
    "its test refuses its canonical_solution where arguments and results are passed by value (numbers, texts, "
    "collections, ranges, iterators; no change in place, no class of the row's own): "
)
_ENDS_LOOPS = ("StopIteration", "StopAsyncIteration")


class StoppedError(BaseException):
    """The solution answers no more: not to be caught by a test that expects exceptions."""


class SolutionError(Exception):
    """The solution raised something that is no exception of Python's own."""


class Solution:
    """The process that holds the solution.

    Args:
        given: of `main`.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self._call_s = float(given["call_s"])
        self.trouble = ""
        take, send = os.pipe()
        receive, give = os.pipe()
        self._pipe, text = values.Pipe(receive, send), given["child"].encode()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _CHILD, str(take), str(give), str(len(text))],
            pass_fds=(take, give), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd="/", env=given["env"], start_new_session=True, preexec_fn=lambda: bounds.limit(given["limits"]),
        )  # fmt: skip
        os.close(take)
        os.close(give)
        try:
            while text:
                text = text[os.write(send, text[:65536]) :]
        except OSError:
            self.trouble = "the process of the solution did not start"

    def load(self, preamble: str, solution: str, workspace: str) -> str:
        """Load it; the reason where it cannot be loaded."""
        if self.trouble:
            return self.trouble
        request = {"preamble": preamble, "solution": solution, "workspace": workspace}
        reply = self._ask(request, LOADING * self._call_s)
        if "loaded" in reply:
            return ""
        return "it raised " + str(reply.get("raised"))[:100] + " when it was loaded"

    def call(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a function of it; raises what it raised, where that is Python's own.

        Raises:
            StoppedError: it does not answer, or not in time, or what it says is no answer.
            SolutionError: it raised another exception.
        """
        if self.trouble:
            raise StoppedError(self.trouble)
        request = {"name": name, "arguments": values.encode(arguments), "keywords": values.encode(keywords)}
        reply = self._ask(request, self._call_s)
        return _result(name, reply)

    def _ask(self, request: dict[str, Any], cpu_s: float) -> dict[str, Any]:
        budget = bounds.Budget(self._process.pid, cpu_s)
        try:
            self._pipe.send(request, budget.left)
            reply = self._pipe.receive(budget.left)
            if isinstance(reply, dict):
                if "value" in reply:
                    reply["value"] = values.decode(reply["value"])
                return reply
            self.trouble = "the solution's process ended" if reply is None else "the solution's process gave no answer"
        except EOFError as error:
            self.trouble = str(error)
        except (values.NotPlainError, RecursionError, MemoryError) as error:
            self.trouble = "what the solution gave cannot be read: " + str(error)
        self.end()
        raise StoppedError(self.trouble)

    def end(self) -> None:
        """Kill it and what is in its process group."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def main(given: dict[str, Any], tell: Callable[[Any], None]) -> None:
    """Tell `{"fault"}` where the row is broken; else `{"started"}`, then `{"correct", "canary", "loaded", "said"}`.

    What keeps the verdict from being told once it has started is the solution's doing: it can reach into this process
    no further than to end it.

    Args:
        given: `reference` (code of what tests may use), `test` (code that defines `check`), `entry_point`, `preamble`
            and `solution` (code), `child` (text for the solution's process), its `env` and `limits`, `call_s`.
        tell: reports a record.
    """
    workspace = str(Path.cwd())
    os.chdir("/")
    fault, check = _checker(given)
    if check is None:
        tell({"fault": fault})
        return
    tell({"started": True})
    solution = Solution(given)
    try:
        tell(_graded(given, solution, check, workspace))
    finally:
        solution.end()


def _result(name: str, reply: dict[str, Any]) -> Any:
    """What a reply says that a call gave, which may be an exception; see `Solution.call`."""
    if "value" in reply:
        return reply["value"]
    if reply.get("missing"):
        raise NameError("name " + repr(name) + " is not defined")
    kind, said = str(reply.get("raised")), str(reply.get("said"))
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception) and kind not in _ENDS_LOOPS:
        try:
            raised = known(said)
        except TypeError:  # such as UnicodeDecodeError, which takes five arguments
            raised = SolutionError(kind + ": " + said)
        raise raised
    raise SolutionError(kind + ": " + said)


def _checker(given: dict[str, Any]) -> tuple[str, Callable[[Any], Any] | None]:
    """The row's `check`, once it has refused a canary and accepted the row's own solution.

    A test that passes what is certainly wrong proves nothing, and one that needs more of the right answer than plain
    values (an argument that is changed in place, a class of its own) would call every solution wrong. The row's own
    is asked here, and what goes to it and comes back is what a pipe would let through.
    """
    name = given["entry_point"]
    fault, check, names = _tested(given)
    if check is None:
        return fault, None
    try:
        check(lambda *arguments, **keywords: values.Opaque("canary"))
        return "its test passes a function that returns nothing right", None
    except Exception:  # noqa: BLE001 - refused, as it should be
        fault, check, names = _tested(given)
    except SystemExit:
        return "its test ends the process that it runs in", None
    if check is None:
        return fault, None

    def own(*arguments: Any, **keywords: Any) -> Any:
        request = {"name": name, "arguments": values.encode(arguments), "keywords": values.encode(keywords)}
        reply = values.carried(candidate.answer(names, values.carried(request)))
        if "value" in reply:
            reply["value"] = values.decode(reply["value"])
        return _result(name, reply)

    try:
        check(own)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the test raises says no
        return _BY_VALUE + _said(error), None
    fault, check, _ = _tested(given)
    return fault, check


def _tested(given: dict[str, Any]) -> tuple[str, Callable[[Any], Any] | None, dict[str, Any]]:
    """The row's `check`, loaded anew so that no run of it finds what the last one left, and the names beside it."""
    module = types.ModuleType("test")
    sys.modules["test"] = module
    for column in ("reference", "test"):
        try:
            exec(compile(given[column], "<" + column + ">", "exec"), module.__dict__)  # noqa: S102 - the row's own
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any code of the row's
            return "its " + column + " cannot be run: " + _said(error), None, {}
    check = module.__dict__.get("check")
    if not callable(check):
        return "its test defines no function check", None, {}
    if given["entry_point"] not in module.__dict__:
        return "its canonical_solution defines no function " + str(given["entry_point"]), None, {}
    return "", check, module.__dict__


def _said(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join((type(error).__name__ + ": " + str(error)).split())[:500]


def _graded(given: dict[str, Any], solution: Solution, check: Callable[[Any], Any], workspace: str) -> dict[str, Any]:
    try:
        said = solution.load(given["preamble"], given["solution"], workspace)
    except StoppedError as error:
        said = str(error)
    if said:
        return {"correct": False, "canary": True, "loaded": False, "said": said}
    correct, said = False, ""
    try:
        check(lambda *arguments, **keywords: solution.call(given["entry_point"], arguments, keywords))
        correct = not solution.trouble
    except StoppedError as error:
        said = str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the test raises says no
        said = _said(error)
    canary = solution.trouble != "" or _refuses(solution)
    if not canary:
        said = "the solution answers for a function that does not exist"
    return {"correct": correct and canary, "canary": canary, "loaded": True, "said": said[:500]}


def _refuses(solution: Solution) -> bool:
    """The process says of a function with a name that was drawn just now that there is none."""
    try:
        solution.call("canary_" + secrets.token_hex(8), (), {})
    except NameError:
        return True
    except (Exception, StoppedError):  # noqa: BLE001 - any other answer is a lie
        return False
    return False
