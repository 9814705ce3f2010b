"""The layer that an agent brings: made once for an image and a key, kept in the store, never there in grading."""

from __future__ import annotations

import asyncio
from typing import Final

from sandbox.protocols import SandboxBackend, SandboxSpec
from stages.environments import environment_key
from stages.protocols import Agent, Environment, EquippedAgent
from stages.store import LayerStore

MAKE_S: Final = 900.0
"""Deadline of making it: a download and some ten thousand files."""


class Equipment:
    """One RUN worker's knowledge of its agent's layers.

    Args:
        agent: the worker's.
        backend: makes the sandbox in which a layer is made.
        store: where layers are found and published.
    """

    def __init__(self, agent: Agent, backend: SandboxBackend, store: LayerStore) -> None:
        self._agent, self._backend, self._store = agent, backend, store
        self._lock = asyncio.Lock()
        self._found: dict[str, str] = {}

    async def layers(self, image: str) -> list[str]:
        """Digests of what lies above the task's layers in a sandbox of this image; none for most agents.

        Raises:
            SandboxError: the sandbox in which it is made broke.
            RolloutError: it cannot be made.
            TimeoutError: it was not made within MAKE_S.
        """
        agent = self._agent
        if not isinstance(agent, EquippedAgent) or not agent.equipment_key:
            return []
        async with self._lock:
            if image not in self._found:
                digest = await asyncio.to_thread(self._store.images.digest, image)
                wanted = Environment(image=image, setup_key=f"agent {agent.equipment_key}")
                key = environment_key(wanted, digest)
                found = await asyncio.to_thread(self._store.find, key)
                self._found[image] = found or await self._make(agent, image, key)
            return [self._found[image]]

    async def _make(self, agent: EquippedAgent, image: str, key: str) -> str:
        async with self._store.standing(image) as ground:
            spec = SandboxSpec(image=ground.image.root, env=ground.image.env)
            async with asyncio.timeout(MAKE_S), self._backend.create(spec) as sandbox:
                await agent.equip(sandbox)
                packed = await sandbox.pack()
                return await asyncio.to_thread(self._store.publish, key, packed)
