"""INIT: make an environment's layer once; every rollout of the environment starts from it."""

from __future__ import annotations

import asyncio

import msgspec

from sandbox.protocols import SandboxBackend, SandboxSpec
from stages.protocols import Task
from stages.store import LayerStore
from stages.wire import InitInput, LeaseOut
from stages.worker import Result, Stagehand


class InitHand(Stagehand):
    """One INIT worker's hands."""

    timeout_class = "sandbox"

    def __init__(self, task: Task, backend: SandboxBackend, store: LayerStore) -> None:
        self._task, self._backend, self._store = task, backend, store

    @property
    def warm(self) -> list[str]:
        """INIT starts from images alone."""
        return []

    async def work(self, lease: LeaseOut) -> Result:
        """Find the layer in the store, or prepare it in a fresh sandbox and publish it."""
        given = msgspec.json.decode(lease.input, type=InitInput)
        found = await asyncio.to_thread(self._store.find, given.environment.key)
        if found is not None:
            return Result(layer=found, cached=True)
        environment = self._task.environment(given.payload)
        async with self._store.standing(environment.image) as ground:
            image = ground.image
            spec = SandboxSpec(image=image.root, workspace=environment.workspace, env=image.env)
            async with asyncio.timeout(given.budget_s), self._backend.create(spec) as sandbox:
                await self._task.prepare(sandbox, given.payload)
                packed = await sandbox.pack()
                digest = await asyncio.to_thread(self._store.publish, given.environment.key, packed)
        return Result(layer=digest)
