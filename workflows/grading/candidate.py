"""Holds a solution that nobody trusts: takes calls over a pipe, gives back plain values. Sent into sandboxes as text.

It may lie about what its functions return and nothing else: what the values should be is not in this process.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

from workflows.grading import values


def main(given: dict[str, Any], pipe: values.Pipe) -> None:
    """Load the solution, then answer calls until the other side closes.

    Args:
        given: `preamble` (code that stands before the solution), `solution`, `workspace`.
        pipe: to the grader.
    """
    sys.path.append(given["workspace"])
    os.chdir(given["workspace"])
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        for name, text in (("<prompt>", given["preamble"]), ("solution.py", given["solution"])):
            exec(compile(text, name, "exec"), module.__dict__)  # noqa: S102 - this process is there for it
    except BaseException as error:  # noqa: BLE001 - whatever it raises, it is no solution
        pipe.send(_raised(error))
        return
    pipe.send({"loaded": True})
    while True:
        request = pipe.receive()
        if request is None:
            return
        pipe.send(answer(module.__dict__, request))


def answer(names: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """The reply to a call: `value`, or `raised` and `said`, or `missing`.

    Args:
        names: where the function is looked for.
        request: `name`, `arguments` and `keywords`.
    """
    function = names.get(request["name"])
    if function is None:
        return {"missing": True}
    try:
        arguments = values.decode(request["arguments"])
        return {"value": values.encode(function(*arguments, **values.decode(request["keywords"])))}
    except BaseException as error:  # noqa: BLE001 - the test says what it makes of an exception
        return _raised(error)


def _raised(error: BaseException) -> dict[str, Any]:
    kind = next((one.__name__ for one in type(error).__mro__ if one.__module__ == "builtins"), "Exception")
    try:
        said = str(error)[:500]
    except Exception:  # noqa: BLE001 - a solution's own class
        said = ""
    return {"raised": kind, "said": said}
