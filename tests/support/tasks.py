"""Tasks of a user's own, outside the packages: chosen by `task._target_`."""

from __future__ import annotations

import asyncio
from typing import Any

from sandbox.protocols import Sandbox
from stages.protocols import Reward, Row
from stages.trajectory import Trajectory
from workflows.tasks.arith import ArithTask


class SlowGrading(ArithTask):
    """Sums of which every eighth takes `slow_s` to grade."""

    name = "slow-grading"

    def __init__(self, slow_s: float = 20.0, **options: Any) -> None:
        super().__init__(**options)
        self._slow_s = slow_s

    async def verify(self, sandbox: Sandbox, row: Row, trajectory: Trajectory) -> Reward:
        if int(row["task_id"].rpartition("-")[2]) % 8 == 0:
            await asyncio.sleep(self._slow_s)
        return await super().verify(sandbox, row, trajectory)


class Breaking(ArithTask):
    """Sums of which one breaks at a boundary: `where` is prepare, prompt or verify."""

    name = "breaking"

    def __init__(self, where: str = "verify", number: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self._where, self._number = where, number

    def _break(self, where: str, row: Row) -> None:
        if where == self._where and row["task_id"].endswith(f"-{self._number}"):
            raise ValueError(f"broken on purpose in {where}")

    async def prepare(self, sandbox: Sandbox, row: Row) -> None:
        self._break("prepare", row)
        await super().prepare(sandbox, row)

    def environment(self, row: Row) -> Any:
        environment = super().environment(row)
        if self._where == "prepare":  # an environment a row, so that one broken one breaks no other
            return type(environment)(environment.image, row["task_id"], environment.workspace)
        return environment

    def prompt(self, row: Row) -> Any:
        self._break("prompt", row)
        return super().prompt(row)

    async def verify(self, sandbox: Sandbox, row: Row, trajectory: Trajectory) -> Reward:
        self._break("verify", row)
        return await super().verify(sandbox, row, trajectory)
