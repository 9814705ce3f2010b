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


BROKEN = {"prepare": 3, "prompt": 30, "verify": 45}
"""Which sum breaks at which boundary."""


class Breaking(ArithTask):
    """Sums of which three break, each at another boundary."""

    name = "breaking"

    def _break(self, where: str, row: Row) -> None:
        if row["task_id"].endswith(f"-{BROKEN[where]}"):
            raise ValueError(f"broken on purpose in {where}")

    async def prepare(self, sandbox: Sandbox, row: Row) -> None:
        self._break("prepare", row)
        await super().prepare(sandbox, row)

    def environment(self, row: Row) -> Any:
        environment = super().environment(row)
        if row["task_id"].endswith(f"-{BROKEN['prepare']}"):  # one of its own, so that it breaks no other row's
            return type(environment)(environment.image, row["task_id"], environment.workspace)
        return environment

    def prompt(self, row: Row) -> Any:
        self._break("prompt", row)
        return super().prompt(row)

    async def verify(self, sandbox: Sandbox, row: Row, trajectory: Trajectory) -> Reward:
        self._break("verify", row)
        return await super().verify(sandbox, row, trajectory)
