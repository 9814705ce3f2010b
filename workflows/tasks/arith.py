"""task=arith: generated or given sums that an agent solves by way of a shell, some with their numbers in a file."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sandbox.protocols import Sandbox
from stages.protocols import Environment, Reward, Row
from stages.trajectory import Message, Trajectory
from workflows.errors import TaskDataError
from workflows.tasks import sums
from workflows.tasks.lines import last_words
from workflows.tasks.rows import broken_environment, check_limit, read_rows, refuse_broken
from workflows.tools import bash

_GENERATED_ROWS = 64
_SHELL_S = 30.0
"""Deadline of the commands that preparing and solving run themselves."""

_STATED = re.compile(r"The answer is (-?[0-9]+)\.")
_FIELDS = {"task_id": str, "question": str, "answer": int}


class ArithTask:
    """Sums with +, - and *; the answer counts when the last assistant message says "The answer is N.".

    Args:
        seed: of the generator; equal seeds give equal rows.
        limit: number of rows; None is every row of `path`, or 64 generated ones.
        path: a JSONL file of rows `{"task_id","question","answer","files"?}` in the generator's place.
        split: "train" or "heldout"; no sum of one is in the other, whatever the seeds.
        file_fraction: share of generated rows, 0 to 1, whose numbers are in a file.

    Raises:
        TaskDataError: an option is out of range.
    """

    name = "arith"
    private = frozenset({"answer"})

    def __init__(
        self,
        seed: int = 0,
        limit: int | None = None,
        path: str | None = None,
        split: sums.Split = "train",
        file_fraction: float = 0.33,
    ) -> None:
        if split not in ("train", "heldout"):
            raise TaskDataError(f"task.options.split: got {split!r}; allowed: train, heldout")
        if not 0 <= file_fraction <= 1:
            raise TaskDataError(f"task.options.file_fraction: got {file_fraction}; allowed: 0 to 1")
        check_limit(limit)
        if limit is None and path is None:
            limit = _GENERATED_ROWS
        self._seed, self._limit, self._path = seed, limit, path
        self._split, self._file_fraction = split, file_fraction

    def rows(self) -> Iterable[Row]:
        """The rows in order; a line that is no row becomes one that fails.

        Raises:
            TaskDataError: `path` cannot be read.
        """
        if self._path is not None:
            return itertools.islice(read_rows(Path(self._path), _checked), self._limit)
        return itertools.islice(sums.generate(self._seed, self._split, self._file_fraction), self._limit)

    def environment(self, row: Row) -> Environment:
        """The host image with the row's files; all rows without files share one environment."""
        files = sorted(row.get("files", {}).items())
        key = "arith-" + (hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16] if files else "plain")
        return broken_environment(row) or Environment(image="host", setup_key=key, workspace=(sums.WORKSPACE,))

    async def prepare(self, sandbox: Sandbox, row: Row) -> None:
        """Make the working directory and write the row's files.

        Raises:
            RolloutError: the row is broken.
            TaskDataError: the directory cannot be made.
        """
        refuse_broken(row)
        result = await sandbox.shell.run(f"mkdir -p {sums.WORKSPACE}", timeout_s=_SHELL_S)
        if result.exit_code != 0:
            raise TaskDataError(f"mkdir {sums.WORKSPACE} gave exit code {result.exit_code}: {result.output.strip()}")
        for path, content in row.get("files", {}).items():
            await sandbox.files.write(path, content.encode())

    def prompt(self, row: Row) -> list[Message]:
        """A short system message and the question."""
        return sums.prompt_of(row)

    def tools(self, row: Row) -> list[dict[str, Any]]:
        """The bash tool."""
        return [bash.SCHEMA]

    async def verify(self, sandbox: Sandbox, row: Row, trajectory: Trajectory) -> Reward:
        """1.0 when the last assistant message states the answer, else 0.0; `format` is 1.0 when it states any."""
        stated = _STATED.findall(last_words(trajectory) or "")
        # The last statement counts: a policy cannot win by naming many numbers.
        correct = bool(stated) and len(stated[-1]) <= 40 and int(stated[-1]) == row["answer"]
        return Reward(float(correct), {"correct": float(correct), "format": float(bool(stated))})

    async def solve(self, sandbox: Sandbox, row: Row) -> str | None:
        """Do the sum in the sandbox's shell, after reading the files there.

        Raises:
            TaskDataError: the question is no sum, or the shell did not print a number.
        """
        numbers = [(await sandbox.files.read(path)).decode() for path in sorted(row.get("files", {}))]
        try:
            expression = sums.expression_of(row["question"], "".join(numbers))
            result = await sandbox.shell.run(f"echo $(({expression}))", timeout_s=_SHELL_S)
            return sums.answer_text(int(result.output))
        except ValueError as error:
            raise TaskDataError(f"{row['task_id']}: cannot be solved: {error}") from error


def _checked(row: dict[str, Any], number: int) -> dict[str, Any] | str:
    """The row, or what keeps it from being one of this task."""
    for field, kind in _FIELDS.items():
        if type(row.get(field)) is not kind:
            return f"{field} must be {'a string' if kind is str else 'an integer'}, got {row.get(field)!r}"
    if not row["task_id"]:
        return "task_id is empty"
    files = row.get("files", {})
    if not isinstance(files, Mapping) or not all(isinstance(content, str) for content in files.values()):
        return "files must map paths to texts"
    for file_path in files:
        inside = file_path.startswith(f"{sums.WORKSPACE}/") and ".." not in file_path.split("/")
        if not inside:
            return f"files: {file_path!r} is not under {sums.WORKSPACE}/"
    return row
