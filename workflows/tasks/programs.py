"""Rows of task=code whose solution is a program: it reads an input, prints an output, and is tried on hidden tests."""

from __future__ import annotations

import asyncio
import base64
import math
import secrets
import zlib
from collections.abc import Mapping
from typing import Any, Final

from sandbox.protocols import Sandbox
from stages.errors import VerifierError
from stages.protocols import Reward, Row
from workflows.grading.outputs import same
from workflows.grading.trusted import run_trusted

PRIVATE: Final = frozenset({"inputs", "outputs", "tests", "solution", "checker"})
COLUMNS: Final = PRIVATE | {
    "task_id", "question", "time_limit_s", "memory_mib", "float_tolerance", "float_absolute", "source",
}  # fmt: skip
"""A column that is not among these is dropped: it might be the solution by another name."""
_TIME_S: Final = 10.0
_MEMORY_MIB: Final = 1024
_MOST_TESTS: Final = 1000
_ROOM: Final = 64 * 1024
"""Bytes of output that are taken beyond four times what is expected."""
_REPORT_BYTES: Final = 64 << 20
_CASE_S: Final = 10.0
_MOST_JUDGING_S: Final = 240.0
_RUNNER: Final = ("workflows.grading.bounds", "workflows.grading.programs")
_LIMITS: Final = {"FSIZE": 64 << 20, "CORE": 0, "NPROC": 1024}


def checked(row: Mapping[str, Any]) -> dict[str, Any] | str:
    """The known columns of a row with its tests as `inputs` and `outputs`, or what is wrong with it."""
    row = {name: value for name, value in row.items() if name in COLUMNS and value is not None}
    if not isinstance(row.get("question"), str):
        return "question is missing, or no text"
    tests = _tests(row)
    if isinstance(tests, str):
        return tests
    for name, most in (("time_limit_s", 600), ("memory_mib", 1 << 20), ("float_tolerance", 1), ("float_absolute", 1e9)):
        value = row.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            return f"{name} must be a number from 0 to {most:g}, got {value!r}"
    for name in ("solution", "checker"):
        if not isinstance(row.get(name, ""), str):
            return f"{name} must be a text"
    if "checker" in row:
        try:
            compile(row["checker"], "checker", "exec")
        except (SyntaxError, ValueError) as error:
            return f"checker is no Python: {error}"
    return {**{name: value for name, value in row.items() if name != "tests"}, "inputs": tests[0], "outputs": tests[1]}


def _tests(row: Mapping[str, Any]) -> tuple[list[str], list[str]] | str:
    if "tests" in row:
        tests = row["tests"]
        if not isinstance(tests, list) or not all(isinstance(one, Mapping) for one in tests):
            return "tests must be a list of objects with input and output"
        inputs, outputs = [one.get("input") for one in tests], [one.get("output") for one in tests]
    else:
        inputs, outputs = row.get("inputs"), row.get("outputs")  # type: ignore[assignment]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        return "inputs and outputs must be lists of one length"
    if not 1 <= len(inputs) <= _MOST_TESTS:
        return f"{len(inputs)} tests; allowed: 1 to {_MOST_TESTS}"
    if not all(isinstance(one, str) for one in (*inputs, *outputs)):
        return "inputs and outputs must be texts"
    return inputs, outputs


def asked(row: Row, solution: str) -> str:
    """What the agent is asked."""
    time_s, memory = row.get("time_limit_s") or _TIME_S, row.get("memory_mib") or _MEMORY_MIB
    return (
        f"{row['question'].strip()}\n\nWrite a Python program to {solution} that reads standard input and prints to "
        f"standard output, within {time_s:g} s and {memory:g} MiB for each input."
    )


async def verify(
    sandbox: Sandbox, row: Row, solution: str | None, env: Mapping[str, str], workspace: str, total_s: float
) -> Reward:
    """Run the program on every input, then compare.

    `passed` is the share of tests that passed; the reward is 1.0 where all did. Tests that were not reached when
    `total_s` was over have not passed.

    Raises:
        VerifierError: the row is broken (final), or the grader broke before the program was started.
    """
    read = checked(row)
    if isinstance(read, str):
        raise VerifierError(f"{row['task_id']}: {read}", final=True)
    if read.get("checker"):
        await _try_checker(sandbox, row["task_id"], read)
    if solution is None:
        return Reward(0.0, {"correct": 0.0, "passed": 0.0, "canary": 1.0, "format": 0.0})
    printed = await _printed(sandbox, read, solution, env, workspace, total_s)
    if read.get("checker"):
        passed = await _judged(sandbox, read, printed, total_s)
    else:
        passed = await asyncio.to_thread(_compared, read, printed)
    share = passed / len(read["inputs"])
    correct = float(passed == len(read["inputs"]))
    return Reward(correct, {"correct": correct, "passed": share, "canary": 1.0, "format": 1.0})


async def _printed(
    sandbox: Sandbox, row: Mapping[str, Any], solution: str, env: Mapping[str, str], workspace: str, total_s: float
) -> list[str | None]:
    """What the program printed for each input; None where it failed there, and nothing for those not reached."""
    memory = int(float(row.get("memory_mib") or _MEMORY_MIB) * (1 << 20))
    time_s = float(row.get("time_limit_s") or _TIME_S)
    given = {
        "solution": solution, "inputs": row["inputs"], "most": [4 * len(one) + _ROOM for one in row["outputs"]],
        "time_s": time_s, "env": dict(env), "workspace": workspace,
        "limits": {**_LIMITS, "AS": memory + (64 << 20), "CPU": math.ceil(time_s) + 1},
    }  # fmt: skip
    graded = await run_trusted(sandbox, _RUNNER, given, cwd=workspace, timeout_s=total_s, report_bytes=_REPORT_BYTES)
    if not graded.records:
        done = graded.execution
        how = "its time ran out" if done.timed_out else f"it ended with {done.exit_code}"
        said = done.output[-500:].decode("utf-8", "replace").strip()
        raise VerifierError(f"the program was not started: {how}: {said}")
    return await asyncio.to_thread(lambda: [_output(told) for told in graded.records[1:]])


def _output(told: Mapping[str, Any]) -> str | None:
    if told["status"] != "ok":
        return None
    return zlib.decompress(base64.b64decode(told["output"])).decode("utf-8", "replace")


def _compared(row: Mapping[str, Any], printed: list[str | None]) -> int:
    """How many outputs are as expected."""
    relative, absolute = float(row.get("float_tolerance", 0)), float(row.get("float_absolute", 0))
    return sum(
        said is not None and same(wanted, said, relative, absolute)
        for wanted, said in zip(row["outputs"], printed, strict=False)
    )


async def _judged(sandbox: Sandbox, row: Mapping[str, Any], printed: list[str | None], total_s: float) -> int:
    """How many outputs the row's checker accepts; it runs where nothing of the program is left.

    An output on which the checker breaks, or which keeps it busy, is not accepted: the program chose it, and a checker
    that is at fault itself was found by `_try_checker`.
    """
    await sandbox.reset()
    cases = [
        [given, wanted, said]
        for given, wanted, said in zip(row["inputs"], row["outputs"], printed, strict=False)
        if said is not None
    ]
    verdicts = await _asked(sandbox, row["checker"], cases, max(total_s, min(len(cases) * _CASE_S, _MOST_JUDGING_S)))
    return verdicts.count(True)


async def _try_checker(sandbox: Sandbox, task_id: str, row: Mapping[str, Any]) -> None:
    """A checker that refuses what is expected, or accepts what is certainly wrong, proves nothing.

    Raises:
        VerifierError: it is one; final.
    """
    given, wanted = row["inputs"][0], row["outputs"][0]
    cases = [[given, wanted, wanted], [given, wanted, f"canary {secrets.token_hex(8)}\n"]]
    verdicts = await _asked(sandbox, row["checker"], cases, 2 * _CASE_S + 30)
    if verdicts[:1] != [True]:
        raise VerifierError(f"{task_id}: its checker does not accept the first expected output", final=True)
    if verdicts[1:] != [False]:
        raise VerifierError(f"{task_id}: its checker accepts random text, or breaks on it", final=True)


async def _asked(sandbox: Sandbox, checker: str, cases: list[list[str]], total_s: float) -> list[bool | None]:
    given = {"checker": checker, "cases": cases, "case_s": _CASE_S, "every": True}
    graded = await run_trusted(sandbox, ("workflows.grading.judging",), given, timeout_s=total_s)
    return [told["accepted"] for told in graded.records]
