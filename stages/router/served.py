"""The task that a run serves: its rows by id, the split into public and private columns, and environment keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stages.environments import environment_key
from stages.errors import ServiceError
from stages.protocols import Environment, Row, Task


class ServedTask:
    """Wraps the workflow's Task for the router. `image_digest` maps an image name to its content digest."""

    def __init__(self, task: Task, image_digest: Callable[[str], str], *, privileged_agent: bool) -> None:
        self._task = task
        self._image_digest = image_digest
        self._privileged = privileged_agent
        self._rows: dict[str, Row] | None = None
        self._digests: dict[str, str] = {}

    def rows(self) -> Mapping[str, Row]:
        """The served data by task id; read once. Blocking: call it in a thread the first time."""
        if self._rows is None:
            self._rows = {row["task_id"]: row for row in self._task.rows()}
        return self._rows

    def row(self, task_id: str, data: dict[str, Any] | None, where: str) -> Row:
        """The row that a submitted task means.

        Raises:
            ServiceError: 400, there is neither data nor a served row of that id.
        """
        if data is not None:
            return {**data, "task_id": task_id}
        row = self.rows().get(task_id)
        if row is None:
            message = f"{where}.task_id: {task_id!r} is not in the served data and has no data of its own"
            raise ServiceError(400, "invalid", message)
        return row

    def environment(self, row: Row) -> tuple[str, Environment]:
        """Key and description of the row's environment."""
        environment = self._task.environment(row)
        digest = self._digests.get(environment.image)
        if digest is None:
            digest = self._digests[environment.image] = self._image_digest(environment.image)
        return environment_key(environment, digest), environment

    def checked_environment(self, row: Row, where: str) -> str:
        """The environment key of a submitted row.

        Raises:
            ServiceError: 400, the task cannot make sense of the row.
        """
        try:
            return self.environment(row)[0]
        except Exception as error:  # the boundary to a task's code, which may be anybody's
            message = f"{where}.data: task {self._task.name} cannot use this row: {type(error).__name__}: {error}"
            raise ServiceError(400, "invalid", message) from error

    def public(self, row: Row) -> dict[str, Any]:
        """The columns that INIT may see."""
        return {name: value for name, value in row.items() if name not in self._task.private}

    def for_agent(self, row: Row) -> dict[str, Any]:
        """The columns that RUN may see: the public ones, and all of them for the oracle."""
        return dict(row) if self._privileged else self.public(row)
