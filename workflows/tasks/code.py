"""task=code: functions and programs with hidden tests; what they give is compared where they cannot reach."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from typing import Any, Final

from sandbox.errors import FilesError
from sandbox.protocols import Sandbox
from stages.errors import VerifierError
from stages.protocols import Reward, Row
from stages.trajectory import Message, Trajectory
from workflows.errors import TaskDataError
from workflows.grading.trusted import Graded, run_trusted, untrusted
from workflows.tasks import programs
from workflows.tasks.datasets import reader
from workflows.tasks.lines import WORKSPACE, LinesTask, last_words
from workflows.tasks.rows import check_positive, wrong_texts

SOLUTION: Final = f"{WORKSPACE}/solution.py"
_COLUMNS: Final = ("prompt", "entry_point", "canonical_solution", "test")
_LARGEST_BYTES: Final = 1024 * 1024
_VALUES: Final = "workflows.grading.values"
_CHILD: Final = (_VALUES, "workflows.grading.candidate")
_GRADER: Final = (*_CHILD, "workflows.grading.bounds", "workflows.grading.functions")
_LIMITS: Final = {"AS": 4 << 30, "FSIZE": 64 << 20, "CORE": 0, "NPROC": 1024}
"""Of the solution's process: bytes of address space, of a file, of a core; processes of the user."""
_CODE_BLOCK: Final = re.compile(
    r"```[ \t]{0,8}(?:python|py|python3)?[ \t]{0,8}\r?\n(.*?)```", re.DOTALL | re.IGNORECASE
)
"""Blanks are bounded, so that time grows with the text's length and no faster."""
_ENV: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": WORKSPACE, "LANG": "C.UTF-8"}
_INFRASTRUCTURE: Final = frozenset({errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE})
_SYSTEM: Final = (
    "You solve programming tasks in Python. You have a shell. Write the solution to the file that you are told, "
    "and try it before you say that you are done."
)


class CodeTask(LinesTask):
    """A function or program to write into /work/solution.py; without that file the last code block of a message counts.

    What stands before the function in the prompt (imports, functions that it may use) is there when the solution is
    loaded. The reward is 1.0 when the row's `check` accepts the function, else 0.0; its parts: `correct`, `canary`
    (0.0: the solution's process was caught lying), `format` (there was a solution that could be loaded).

    A row without an entry_point is a program's: `question`, `inputs` and `outputs` (or `tests`, a list of objects with
    input and output), and, where it has them, `time_limit_s` (CPU seconds an input), `memory_mib`, `float_tolerance`
    and `float_absolute` (of decimal numbers), `checker` (a Python program that takes the paths of input, expected
    output and output, and ends with 0 where it accepts), `solution`. Its part `passed` is the share of tests.

    Args:
        path: JSONL or Parquet: task_id, prompt, entry_point, canonical_solution, test; or a program's columns.
        limit: number of rows; None is all.
        call_s: CPU seconds that one call of the function may take.
        total_s: seconds that grading may take.
        columns: whose columns the file has: rows (the above) or eurus-2.

    Raises:
        TaskDataError: an option is out of range.
    """

    name = "code"
    columns = "HumanEval's columns, or with question, inputs and outputs"
    private = frozenset({"canonical_solution", "test"}) | programs.PRIVATE

    def __init__(
        self,
        path: str | None = None,
        limit: int | None = None,
        call_s: float = 5.0,
        total_s: float = 60.0,
        columns: str = "rows",
    ) -> None:
        super().__init__(path, limit)
        check_positive(call_s=call_s, total_s=total_s)
        self._call_s, self._total_s, self._read = call_s, total_s, reader(columns, "code")

    def checked(self, row: dict[str, Any], number: int) -> dict[str, Any] | str | None:
        """A function's columns are texts, and the entry point is a name; a program has tests."""
        read = self._read(row, number)
        if read is None or isinstance(read, str):
            return read
        row = read
        if "entry_point" not in row and "question" in row:
            row = {"task_id": f"code-{number}", **row}
            whole = programs.checked(row)
            return whole if isinstance(whole, str) else (wrong_texts(row, ("task_id",)) or whole)
        wrong = wrong_texts(row, ("task_id", *_COLUMNS))
        if wrong or not row["task_id"]:
            return wrong or "task_id is empty"
        if not row["entry_point"].isidentifier():
            return f"entry_point {row['entry_point']!r} is no name of a function"
        return row

    def prompt(self, row: Row) -> list[Message]:
        """What to write and where."""
        if "question" in row:
            return [Message("system", _SYSTEM), Message("user", programs.asked(row, SOLUTION))]
        asked = (
            f"Complete the Python function `{row['entry_point']}`. Write it, with everything that it needs, to "
            f"{SOLUTION}.\n\n```python\n{row['prompt'].rstrip()}\n```"
        )
        return [Message("system", _SYSTEM), Message("user", asked)]

    async def verify(self, sandbox: Sandbox, row: Row, trajectory: Trajectory) -> Reward:
        """Run the row's `check` on the solution, or the program on its tests.

        Raises:
            VerifierError: the row is broken (final), or the grader did not run.
        """
        if "question" in row:
            text = await _solution(sandbox, trajectory)
            return await programs.verify(sandbox, row, text, _ENV, WORKSPACE, self._total_s)
        wrong = wrong_texts(row, _COLUMNS)
        if wrong:
            raise VerifierError(f"{row['task_id']}: {wrong}", final=True)
        solution = await _solution(sandbox, trajectory)
        if solution is None:
            return Reward(0.0, {"correct": 0.0, "canary": 1.0, "format": 0.0})
        given = {
            "reference": row["prompt"] + row["canonical_solution"], "test": row["test"],
            "entry_point": row["entry_point"], "preamble": _preamble(row), "solution": solution,
            "child": untrusted(_CHILD), "call_s": self._call_s, "limits": _LIMITS,
            "env": _ENV,
        }  # fmt: skip
        graded = await run_trusted(sandbox, _GRADER, given, cwd=WORKSPACE, timeout_s=self._total_s)
        return _reward(row, graded)

    async def solve(self, sandbox: Sandbox, row: Row) -> str | None:
        """Write the canonical solution, or the row's program.

        Raises:
            TaskDataError: a program's row has none.
        """
        if "question" in row and not row.get("solution"):
            raise TaskDataError(f"{row['task_id']}: column solution is missing: nobody knows this row's program")
        text = row["solution"] if "question" in row else row["prompt"] + row["canonical_solution"]
        await sandbox.files.write(SOLUTION, text)
        return None


def _preamble(row: Mapping[str, Any]) -> str:
    """The prompt up to the function that it asks for."""
    found = re.search(rf"^(?:async\s+)?def\s+{re.escape(row['entry_point'])}\b", row["prompt"], re.MULTILINE)
    return str(row["prompt"][: found.start()]) if found else ""


async def _solution(sandbox: Sandbox, trajectory: Trajectory) -> str | None:
    """The text of the solution; None where there is none that could be read."""
    try:
        return (await sandbox.files.read(SOLUTION, limit_bytes=_LARGEST_BYTES)).decode("utf-8", "replace")
    except FilesError as error:
        number = error.detail.get("errno")
        if number in _INFRASTRUCTURE:
            raise
        if number != errno.ENOENT:  # a directory, a link to nowhere good, a file too large: the agent's doing
            return None
    blocks = _CODE_BLOCK.findall(last_words(trajectory) or "")
    return blocks[-1][:_LARGEST_BYTES] if blocks else None


def _reward(row: Row, graded: Graded) -> Reward:
    """The reward of what the grader told.

    Raises:
        VerifierError: the row is broken (final), or the grader broke before the solution was started.
    """
    told = graded.records[-1] if graded.records else {}
    if "fault" in told:
        raise VerifierError(f"{row['task_id']}: {told['fault']}", final=True)
    if "correct" in told:
        parts = {"correct": told["correct"], "canary": told["canary"], "format": told["loaded"]}
        return Reward(float(told["correct"]), {name: float(part) for name, part in parts.items()})
    if "started" in told:
        return Reward(0.0, {"correct": 0.0, "canary": 1.0, "format": 1.0})
    done = graded.execution
    how = "its time ran out" if done.timed_out else f"it ended with {done.exit_code}"
    said = done.output[-1000:].decode("utf-8", "replace").strip()
    raise VerifierError(f"{row['task_id']}: the test was not ready to run: {how}: {said}")
