"""A ledger with a fleet on top and no journal: what is put is durable at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from stages.engine_control import EngineControl, EngineControlError, WeightsError
from stages.ledger.events import ReplicaChanged
from stages.ledger.machine import Ledger
from stages.router.policy import PolicyKeeper
from stages.router.readings import Reading
from stages.router.replicas import FleetRules, Replicas
from stages.router.waiters import Waiters
from stages.wire import SessionIn, SessionOut
from tests.support.ledgers import Driven


class InstantRouter:
    """What Replicas and PolicyKeeper ask of a router."""

    def __init__(self, driven: Driven | None = None) -> None:
        self.driven = driven or Driven()
        self.waiters, self.stopping, self.woken = Waiters(), False, 0

    @property
    def ledger(self) -> Ledger:
        return self.driven.ledger

    def clock(self) -> float:
        return self.driven.t

    def put(self, event: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(self.driven.apply(event))
        return future

    async def durable(self, event: asyncio.Future[Any]) -> Any:
        return await event

    async def submit(self, event: Any) -> Any:
        return self.driven.apply(event)

    def wake_leases(self) -> None:
        self.woken += 1


class ToyFleet:
    """Replicas r0.. of a toy ledger whose rollouts are all in RUN; `dead` and `readings` are what probes find."""

    def __init__(self, replicas: int, rollouts: int, engines: Any = None, check: Any = None, **rules: Any) -> None:
        self.router = InstantRouter()
        self.dead: set[str] = set()
        self.readings: dict[str, Reading] = {}
        self.replicas = Replicas(self.router, self._probe, self._read, FleetRules(**rules))  # type: ignore[arg-type]
        self.replicas.policy = PolicyKeeper(
            self.router, engines or EngineControl(), sync=self.replicas.rules.sync, woken=self.replicas.woken,  # type: ignore[arg-type]
            check=check or (lambda path: None),
        )  # fmt: skip
        for number in range(replicas):
            self.join(f"r{number}")
        self.rollouts = self.router.driven.submit(n=rollouts)
        self.router.driven.through("init")
        for rollout_id in self.rollouts:
            self.router.driven.lease("run", free=1)
            assert rollout_id in self.router.ledger.state.rollouts

    @property
    def fleet(self) -> Any:
        return self.router.ledger.state.fleet

    def join(self, name: str, url: str = "", capacity: int = 64) -> None:
        self.router.driven.apply(
            ReplicaChanged(t=1.0, replica=name, change="join", url=url or f"http://{name}", model="m",
                           capacity=capacity)
        )  # fmt: skip

    async def open(self, rollout_id: str, failed: str | None = None) -> SessionOut:
        return await self.replicas.open_session(SessionIn(rollout_id=rollout_id, attempt=1, failed=failed))

    async def open_all(self, rollouts: list[str] | None = None) -> list[str]:
        return [(await self.open(rollout_id)).replica_id for rollout_id in rollouts or self.rollouts]

    async def _probe(self, url: str) -> bool:
        return url.removeprefix("http://") not in self.dead

    async def _read(self, url: str) -> Reading | None:
        return self.readings.get(url.removeprefix("http://"))


class ScriptedEngines:
    """Swaps that end as they are told: `failing` names replicas' URLs, `paused` those that stand still;

    `free` unset keeps all under way.
    """

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self.failing: set[str] = set()
        self.paused: set[str] = set()
        self.under_way: list[str] = []
        self.most_at_once = 0
        self.done: list[tuple[str, int, str | None, str]] = []
        self.free = asyncio.Event()
        self.free.set()

    async def swap(self, url: str, version: int, directory: Path | None, mode: str = "keep") -> None:
        self.under_way.append(url)
        self.most_at_once = max(self.most_at_once, len(self.under_way))
        try:
            await self.free.wait()
            if url in self.failing:
                raise EngineControlError(f"replica {url}: /collective_rpc answered 500", status=500)
            self.versions[url] = str(version)
            self.done.append((url, version, str(directory) if directory else None, mode))
        finally:
            self.under_way.remove(url)

    async def load_adapter(self, url: str, version: int, name: str, directory: Path, mode: str = "keep") -> None:
        await self.swap(url, version, directory / name, mode)

    async def weight_version(self, url: str) -> str:
        return self.versions.get(url, "0")

    async def is_paused(self, url: str) -> bool:
        return url in self.paused

    async def resume(self, url: str) -> None:
        if url in self.failing:
            raise EngineControlError(f"replica {url}: /resume answered 500", status=500)
        self.paused.discard(url)


def refusing(path: Path) -> None:
    """A check that finds no weights anywhere."""
    raise WeightsError(f"{path}: no safetensors file there")
