"""Cheats played against graders that believe what they see, each in a sandbox of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sandbox.layers import unpack
from sandbox.protocols import Sandbox, SandboxBackend, SandboxSpec
from stages.protocols import Limits
from stages.trajectory import Message
from tests.support import problems
from tests.support import swe_instance as small
from tests.support.cheats import code, naive, swe
from workflows.tasks.code import CodeTask
from workflows.tasks.swe import SweTask, setting

NOTHING = "nothing"
"""The name of an agent that leaves things as they are, or a solution that is plainly wrong."""
CODE = [name for name in code.NAMES if name not in code.VANDALS and name not in code.INSIDERS]
SWE = [name for name in swe.CHEATS if name not in swe.VANDALS and name not in swe.INSIDERS]


class Ear:
    """A model that is only told."""

    said = ""

    def say(self, *, messages: list[Message], reply: Message, tools: Any = None) -> None:
        """What the agent says in the end."""
        self.said = reply.content


async def play_code(backend: SandboxBackend, scratch: Path, names: Iterable[str]) -> dict[str, set[str]]:
    """The signs of success that each cheat gives the naive grader of task=code."""
    task = CodeTask(str(problems.write(scratch / "rows.jsonl", problems.rows())))
    (row, *_), found = problems.rows(), {}
    for name in names:
        async with backend.create(SandboxSpec()) as sandbox:
            await naive.hide_code(sandbox, row)
            ear = Ear()
            if name == NOTHING:
                await sandbox.files.write("/work/solution.py", code.WRONG)
            else:
                await code.Cheat(task).run({**row, "task_id": name}, ear, sandbox, Limits())  # type: ignore[arg-type]
            found[name] = await naive.grade_code(sandbox, ear.said)
    return found


async def prepared(backend: SandboxBackend, scratch: Path) -> SandboxSpec:
    """The small instance's environment as a sandbox starts from it."""
    task = SweTask(str(small.write(scratch, [small.row()])))
    (row,) = task.rows()
    async with backend.create(SandboxSpec(workspace=(setting.ROOT,))) as sandbox:
        await task.prepare(sandbox, row)
        packed = await sandbox.pack()
        with Path(packed.path).open("rb") as file:
            unpack(file, scratch / "layer", digest=packed.digest)
    return SandboxSpec(workspace=(setting.ROOT,), layers=(str(scratch / "layer"),))


async def leave(sandbox: Sandbox, name: str) -> None:
    """What a cheat, or the honest agent, does."""
    script = {**swe.CHEATS, **swe.HONEST, NOTHING: ""}[name]
    await sandbox.shell.run(f"cd {setting.ROOT}\n{script}", timeout_s=60.0)


async def play_swe(backend: SandboxBackend, scratch: Path, names: Iterable[str]) -> dict[str, set[str]]:
    """The signs of success that each cheat gives the naive grader of task=swe."""
    spec, found = await prepared(backend, scratch), {}
    for name in names:
        async with backend.create(spec) as sandbox:
            await naive.hide_swe(sandbox)
            await leave(sandbox, name)
            found[name] = await naive.grade_swe(sandbox)
    return found
