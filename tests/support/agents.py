"""Agents of a user's own, outside the packages: chosen by `agent._target_`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sandbox.protocols import Sandbox
from stages.protocols import Limits, Model, Row, Task
from stages.trajectory import Message

STEP = """
export COUNT=$((${COUNT:-0}+1)); mkdir -p d$COUNT; cd d$COUNT; echo $COUNT >>/work/log; touch /work/f$COUNT
rm -f /etc/passwd /work/f$((COUNT-1)); sleep %g
[ -e /etc/passwd ] && echo deleted for nothing; set -- /work/f*
echo "count=$COUNT cwd=$PWD log=$(tr '\\n' , </work/log) files=$*"
"""
"""One step: each shell variable, directory, file and deletion of it rests on the step before."""


def told_after(steps: int) -> str:
    """What step number `steps` prints where nothing before it was lost or done twice."""
    cwd = "/work" + "".join(f"/d{n}" for n in range(1, steps + 1))
    log = "".join(f"{n}," for n in range(1, steps + 1))
    return f"count={steps} cwd={cwd} log={log} files=/work/f{steps}"


class Steps:
    """Lets the policy speak `turns` times, with a step in the sandbox between; its whole state is its messages.

    Args:
        task: whose prompt is answered.
        turns: how often the policy speaks.
        pause_s: seconds that a step sleeps.
        go: a file; once it is there steps no longer sleep, so that a test need not wait for what it has seen.
    """

    name = "steps"
    privileged = False

    def __init__(self, task: Task, turns: int = 8, pause_s: float = 0.3, go: str | None = None) -> None:
        self._task, self._turns, self._pause_s = task, turns, pause_s
        self._go = None if go is None else Path(go)

    async def run(self, row: Row, model: Model, sandbox: Sandbox, limits: Limits) -> None:
        await self.resume(row, model, sandbox, limits, self._task.prompt(row))

    async def resume(
        self, row: Row, model: Model, sandbox: Sandbox, limits: Limits, messages: Sequence[Message]
    ) -> None:
        said = list(messages)
        while sum(message.role == "assistant" for message in said) < self._turns:
            if said[-1].role == "assistant":
                pause_s = 0.0 if self._go is not None and self._go.exists() else self._pause_s
                result = await sandbox.shell.run(STEP % pause_s, timeout_s=60)
                said.append(Message("user", result.output.replace("\r", "").strip()))
            said.append(await model.generate(messages=said))
