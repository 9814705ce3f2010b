"""INIT, RUN and EVAL of one rollout on one backend, without a run around them: what a task makes of what is left."""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable
from pathlib import Path

from sandbox.layers import unpack
from sandbox.protect import Protection
from sandbox.protocols import Sandbox, SandboxBackend, SandboxSpec
from stages.protocols import Reward, Row, Task
from stages.trajectory import Message, Trajectory


async def prepared(backend: SandboxBackend, scratch: Path, task: Task, row: Row) -> SandboxSpec:
    """INIT: what a sandbox of the row's environment is made of; on the host image."""
    workspace = task.environment(row).workspace
    async with backend.create(SandboxSpec(workspace=workspace)) as sandbox:
        await task.prepare(sandbox, row)
        packed = await sandbox.pack()
        with Path(packed.path).open("rb") as file:
            unpack(file, scratch / "layer", digest=packed.digest)
    return SandboxSpec(workspace=workspace, layers=(str(scratch / "layer"),))


async def graded(
    backend: SandboxBackend,
    scratch: Path,
    task: Task,
    row: Row,
    act: Callable[[Sandbox], Awaitable[str | None]],
    spec: SandboxSpec | None = None,
) -> Reward:
    """The reward of what `act` leaves in RUN's sandbox, and says in the end.

    Args:
        backend: on which the sandboxes are.
        scratch: an empty directory.
        task: whose environment and verifier it is.
        row: of the task.
        act: the agent.
        spec: as of `prepared`, where several rollouts share it.
    """
    spec = spec or await prepared(backend, scratch, task, row)
    environment = task.environment(row)
    layers = list(spec.layers)
    async with backend.create(spec) as sandbox:
        said = await act(sandbox)
        packed = await sandbox.pack(paths=environment.workspace, exclude=environment.protected)
        content = Path(packed.path).read_bytes()
    if packed.entries:
        left = scratch / f"left-{len(list(scratch.iterdir()))}"
        unpack(io.BytesIO(content), left, digest=packed.digest)
        Protection(environment.workspace, environment.protected).apply(left, [Path(layer) for layer in layers])
        layers.append(str(left))
    async with backend.create(SandboxSpec(workspace=environment.workspace, layers=tuple(layers))) as sandbox:
        return await task.verify(sandbox, row, Trajectory([], [Message("assistant", said or "")]))
