"""The layer that an agent brings: made once for an image and a key, kept in the store, never there in grading."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Final

from sandbox.protocols import SandboxBackend, SandboxSpec
from stages.environments import environment_key
from stages.errors import RolloutError
from stages.protocols import Agent, Environment, EquippedAgent
from stages.store import LayerStore

MAKE_S: Final = 900.0
"""Deadline of making it: a download and some ten thousand files."""
AGAIN_S: Final = 60.0
"""Seconds after a failure until it is tried again: what it met is seldom over sooner, and a try takes minutes."""


class Equipment:
    """One RUN worker's knowledge of its agent's layers.

    Args:
        agent: the worker's.
        backend: makes the sandbox in which a layer is made.
        store: where layers are found and published.
    """

    def __init__(self, agent: Agent, backend: SandboxBackend, store: LayerStore) -> None:
        self._backend, self._store = backend, store
        self._agent = agent if isinstance(agent, EquippedAgent) else None  # asked once: it looks at every member
        self._making: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._found: dict[str, str] = {}
        self._failed: dict[str, tuple[Exception, float]] = {}

    async def layers(self, image: str) -> list[str]:
        """Digests of what lies above the task's layers in a sandbox of this image; none for most agents.

        Raises:
            SandboxError: the sandbox in which it is made broke.
            RolloutError: it cannot be made; final where the backend has no layers.
            TimeoutError: it was not made within MAKE_S.
        """
        agent = self._agent
        if agent is None or not agent.equipment_key:
            return []
        if self._backend.name == "none":  # what it would install lies where every user of the machine writes
            raise RolloutError("agent.harness: sandbox=none has no layers; use agent.harness=command", final=True)
        came = time.monotonic()
        async with self._making[image]:
            if image not in self._found:
                await self._wait(image, came)
                try:
                    self._found[image] = await self._find(agent, image)
                except Exception as error:  # those who wait now fail with it too; raised again
                    self._failed[image] = error, time.monotonic()
                    raise
            return [self._found[image]]

    async def _wait(self, image: str, came: float) -> None:
        """Until it may be tried again: who waited while it failed fails with it, who comes later does not spend a try.

        Raises:
            Exception: as it failed, while this one waited or for good.
        """
        if image not in self._failed:
            return
        error, at = self._failed[image]
        left = at + AGAIN_S - time.monotonic()
        if at >= came or (left > 0 and getattr(error, "detail", {}).get("final")):
            raise error.with_traceback(None)
        await asyncio.sleep(max(0.0, left))

    async def _find(self, agent: EquippedAgent, image: str) -> str:
        digest = await asyncio.to_thread(self._store.images.digest, image)
        key = environment_key(Environment(image=image, setup_key=f"agent {agent.equipment_key}"), digest)
        found = await asyncio.to_thread(self._store.find, key)
        return found or await self._make(agent, image, key)

    async def _make(self, agent: EquippedAgent, image: str, key: str) -> str:
        async with self._store.standing(image) as ground:
            spec = SandboxSpec(image=ground.image.root, env=ground.image.env)
            async with asyncio.timeout(MAKE_S), self._backend.create(spec) as sandbox:
                await agent.equip(sandbox)
                packed = await sandbox.pack()
                return await asyncio.to_thread(self._store.publish, key, packed)
