"""What tasks share whose rows are the lines of a JSONL file and which need nothing but a directory to work in."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from sandbox.protocols import Sandbox
from stages.protocols import Environment, Row
from stages.trajectory import Trajectory
from workflows.errors import TaskDataError
from workflows.tasks.rows import broken_environment, check_limit, read_rows, refuse_broken
from workflows.tools import bash

WORKSPACE: Final = "/work"


class LinesTask(ABC):
    """Rows out of a file, all in one environment of the host image; agents have the bash tool and work in /work.

    Args:
        path: a JSONL file.
        limit: number of rows; None is all.

    Raises:
        TaskDataError: an option is out of range.
    """

    name: str
    columns: str
    """Whose columns the file has, in words."""

    def __init__(self, path: str | None, limit: int | None) -> None:
        if path is None:
            raise TaskDataError(
                f"task.path: task={self.name} has no data of its own: give a JSONL file with {self.columns}"
            )
        check_limit(limit)
        self._path, self._limit = Path(path), limit

    @abstractmethod
    def checked(self, row: dict[str, Any], number: int) -> dict[str, Any] | str | None:
        """The row of a line's value and number, or what is wrong with it; None for a row of another task."""

    def rows(self) -> Iterable[Row]:
        """The rows in order; a line that is no row becomes one that fails.

        Raises:
            TaskDataError: `path` cannot be read.
        """
        return itertools.islice(read_rows(self._path, self.checked), self._limit)

    def environment(self, row: Row) -> Environment:
        """All rows share one environment."""
        return broken_environment(row) or Environment(image="host", setup_key=self.name, workspace=(WORKSPACE,))

    async def prepare(self, sandbox: Sandbox, row: Row) -> None:
        """Start the sandbox, which makes the working directory.

        Raises:
            RolloutError: the row is broken.
        """
        refuse_broken(row)
        await sandbox.start()

    def tools(self, row: Row) -> list[dict[str, Any]]:
        """The bash tool."""
        return [bash.SCHEMA]


def last_words(trajectory: Trajectory) -> str | None:
    """The last thing that the assistant said; None where it said nothing."""
    said = [message.content for message in trajectory.messages if message.role == "assistant"]
    return said[-1] if said else None
