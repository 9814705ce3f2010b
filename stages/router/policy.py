"""POST /v1/policy: a version's weights onto every replica, journaled before and after; who fails is out until it has.

An intent without an outcome, left by a router that died, is done again by the next one: every step may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec

from stages.engine_control import EngineControlError, PauseMode, WeightsError, check_weights
from stages.errors import ServiceError
from stages.ledger.events import PolicyChanged, PolicyIntended, ReplicaChanged
from stages.ledger.fleet import DOWN, Replica, Weights
from stages.router.core import Router
from stages.wire import PolicyIn

NO_SUCH_ROUTE: Final = frozenset({404, 405, 501})
CLOSE_S: Final = 5.0
"""How long a leaving router lets a swap go on before it takes its hands off the engines."""
CATCH_UP_S: Final = (2.0, 60.0)
"""First and longest wait before a replica that is behind is tried again."""

log = logging.getLogger(__name__)


class Engines(Protocol):
    """What a swap asks of engines; `stages.engine_control.EngineControl` is the real one."""

    async def swap(self, url: str, version: int, directory: Path | None, mode: PauseMode = "keep") -> None:
        """Serve another version."""
        ...

    async def load_adapter(self, url: str, version: int, name: str, directory: Path, mode: PauseMode = "keep") -> None:
        """Serve another version of a LoRA adapter."""
        ...

    async def weight_version(self, url: str) -> str:
        """What the engine calls its weights."""
        ...

    async def is_paused(self, url: str) -> bool:
        """Whether it draws nothing."""
        ...

    async def resume(self, url: str) -> None:
        """Go on after a pause."""
        ...


class _Waits(msgspec.Struct):
    until: float = 0.0
    next_s: float = CATCH_UP_S[0]


class PolicyKeeper:
    """Brings policy versions onto the fleet on behalf of the router.

    Args:
        router: whose ledger knows the fleet.
        engines: calls to the replicas.
        sync: `together` swaps all replicas at once; `rolling` one after the other, the others serve meanwhile.
        woken: called when a replica may be assigned again.
        check: looks at a directory of weights; blocking, raises WeightsError.
    """

    def __init__(
        self,
        router: Router,
        engines: Engines,
        *,
        sync: Literal["together", "rolling"] = "together",
        woken: Callable[[], None] = lambda: None,
        check: Callable[[Path], None] = check_weights,
    ) -> None:
        self._router, self._engines, self._sync, self._woken, self._check = router, engines, sync, woken, check
        self._one = asyncio.Lock()
        self._driving: asyncio.Task[None] | None = None
        self._waits: dict[str, _Waits] = {}
        self._closed = False
        self.syncing: dict[str, str] = {}
        """Replicas that are being given weights now, with the mode that becomes of what they run."""
        fleet = router.ledger.state.fleet
        self.renamed: set[str] = set() if fleet.weights is None else set(fleet.sessions)
        """Rollouts whose workers may name another adapter, or none, until they ask for their session again: they would
        sample from other weights than the current version's. At the start nobody knows what they were told."""

    async def set(self, request: PolicyIn) -> None:
        """Make a version current; returns when every replica has it or is out.

        Raises:
            ServiceError: 409, the version is not above the current one or another one is on its way; 400, the path
                holds no weights that could be loaded.
        """
        weights = Weights(request.version, request.weights_path, request.mode, request.adapter)
        self._check_newer(weights)
        if weights.path is not None:
            await self._check_path(weights)
        async with self._one:
            await self._settled()
            if self._router.ledger.state.fleet.weights == weights:
                return  # asked twice: the first asking has done it
            self._check_newer(weights)
            self._check_open()
            await self._router.submit(
                PolicyIntended(
                    t=self._router.clock(), version=weights.version, weights_path=weights.path, mode=weights.mode,
                    adapter=weights.adapter,
                )
            )  # fmt: skip
            await self._driven()

    def _check_newer(self, weights: Weights) -> None:
        state = self._router.ledger.state
        if weights.version <= state.policy_version:
            message = f"version: {weights.version} is not above the current {state.policy_version}"
            raise ServiceError(409, "not_newer", message, current=state.policy_version)
        pending = state.fleet.swap
        if pending is not None and weights != pending and weights.version <= pending.version:
            message = f"version: {weights.version} is not above {pending.version}, which is being loaded"
            raise ServiceError(409, "not_newer", message, current=state.policy_version)

    async def _check_path(self, weights: Weights) -> None:
        assert weights.path is not None
        path = Path(weights.path)
        try:
            if not path.is_absolute():
                raise WeightsError(f"{path}: is not absolute, and every node must find it")
            await asyncio.to_thread(_check_adapter if weights.adapter else self._check, path)
        except (WeightsError, OSError, ValueError) as error:
            raise ServiceError(400, "unusable_path", f"weights_path: {error}", field="weights_path") from error

    def _check_open(self) -> None:
        if self._closed:
            raise ServiceError(503, "stopping", "the router leaves; ask the next one", retry_after_s=1)

    async def _settled(self) -> None:
        """Drive what is pending, also where whoever asked for it has gone."""
        if self._router.ledger.state.fleet.swap is not None:
            await self._driven()

    async def _driven(self) -> None:
        """Drive the pending swap to its outcome, whoever stops waiting for it."""
        self._check_open()
        if self._driving is None or self._driving.done():
            self._driving = asyncio.create_task(self._drive(), name="policy")
        await asyncio.shield(self._driving)

    async def _drive(self) -> None:
        weights = self._router.ledger.state.fleet.swap
        assert weights is not None
        replicas = list(self._router.ledger.state.fleet.replicas.values())
        failed = {
            r.id: f"was down when version {weights.version} came: {r.reason}" for r in replicas if r.health == DOWN
        }
        gate = asyncio.Semaphore(1 if self._sync == "rolling" else len(replicas) + 1)

        async def one(replica: Replica) -> None:
            async with gate:
                error = await self._give(replica, weights)
            if error is not None:
                log.error("%s is out: %s", replica.id, error)
                failed[replica.id] = error

        async with asyncio.TaskGroup() as tasks:
            for replica in replicas:
                if replica.id not in failed:
                    tasks.create_task(one(replica))
        # Replicas that joined meanwhile have the old weights: they catch up like those that failed.
        known = {replica.id for replica in replicas}
        joined = [r for r in self._router.ledger.state.fleet.replicas if r not in known] if weights.path else []
        failed |= dict.fromkeys(joined, f"joined while version {weights.version} was being loaded")
        fleet = self._router.ledger.state.fleet
        if weights.adapter != (None if fleet.weights is None else fleet.weights.adapter):
            self.renamed = set(fleet.sessions)
        await self._router.put(  # however long the filesystem takes: the engines have it
            PolicyChanged(
                t=self._router.clock(), version=weights.version, weights_path=weights.path, mode=weights.mode,
                adapter=weights.adapter, failed=failed,
            )
        )  # fmt: skip
        self._waits.clear()
        self._woken()

    async def _give(self, replica: Replica, weights: Weights, mode: str | None = None) -> str | None:
        """Give a replica these weights; the error where it could not take them."""
        how: PauseMode = mode or weights.mode  # type: ignore[assignment]
        path = None if weights.path is None else Path(weights.path)
        self.syncing[replica.id] = how
        try:
            if weights.adapter is not None and path is not None:
                await self._engines.load_adapter(replica.url, weights.version, weights.adapter, path, how)
            else:
                await self._engines.swap(replica.url, weights.version, path, how)
        except EngineControlError as error:
            if path is None and error.detail.get("status") in NO_SUCH_ROUTE:
                return None  # the trainer loads its engines itself, and these have no version to stamp
            return f"version {weights.version}: {error}"
        finally:
            self.syncing.pop(replica.id, None)
        return None

    async def finish_pending(self) -> None:
        """At the start: what an earlier router intended and did not see through is done again."""
        if self._router.ledger.state.fleet.swap is not None:
            async with self._one:
                await self._settled()

    async def close(self, grace_s: float = CLOSE_S) -> None:
        """The router leaves: no engine stays paused because of it. What is still undone then, the next one does."""
        self._closed = True
        if self._driving is None or self._driving.done():
            return
        _, late = await asyncio.wait({self._driving}, timeout=grace_s)
        for task in late:
            task.cancel()
            await asyncio.wait({task})
        if not self._driving.cancelled() and (error := self._driving.exception()) is not None:
            log.error("the swap under way at the end failed: %s", error)

    @property
    def _busy(self) -> bool:
        return self._one.locked() or self._router.ledger.state.fleet.swap is not None

    async def unpause(self, replica: Replica) -> str | None:
        """Resume a replica that this run's swaps left paused; the error where it stays so.

        Only where the run loads the weights: a trainer that does pauses its engines itself, and would be disturbed.
        """
        weights = self._router.ledger.state.fleet.weights
        if weights is None or weights.path is None or self._busy or replica.id in self.syncing:
            return None
        try:
            paused = await self._engines.is_paused(replica.url)
        except EngineControlError:
            return None  # whether it answers at all is the health probes' business
        if not paused or self._busy:
            return None
        async with self._one:  # no swap begins while it is being resumed
            log.warning("%s was left paused: it is resumed", replica.id)
            return await self._resumed(replica)

    def must_wait(self, replica: Replica) -> bool:
        """Whether a healthy replica may not serve yet, because it lacks the current weights."""
        return self._router.ledger.state.fleet.behind(replica)

    async def catch_up(self, replica: Replica) -> None:
        """Give a healthy replica that is out what it missed, now and then, and take it back when it has it."""
        waits = self._waits.setdefault(replica.id, _Waits())
        if time.monotonic() < waits.until or self._busy:
            return
        async with self._one:
            weights = self._router.ledger.state.fleet.weights
            if weights is None or replica.id not in self._router.ledger.state.fleet.replicas:
                return
            error = await self._missing(replica, weights)
            if error is None:
                self._waits.pop(replica.id, None)
                self._change(replica, "ready", "", weights.version)
                self._woken()
                return
        waits.until, waits.next_s = time.monotonic() + waits.next_s, min(CATCH_UP_S[1], 2 * waits.next_s)
        if error != replica.reason:
            self._change(replica, "down", error, None)

    async def _missing(self, replica: Replica, weights: Weights) -> str | None:
        if weights.adapter is None:
            stamped = False
            with contextlib.suppress(EngineControlError):
                stamped = await self._engines.weight_version(replica.url) == str(weights.version)
            if stamped:
                return await self._resumed(replica)
        if weights.path is None:
            return f"does not serve version {weights.version}: load it, stamp it, or register the replica anew"
        return await self._give(replica, weights, "abort")

    async def _resumed(self, replica: Replica) -> str | None:
        """A swap that broke after its stamp may have left it paused, of which /health says nothing."""
        try:
            await self._engines.resume(replica.url)
        except EngineControlError as error:
            return None if error.detail.get("status") in NO_SUCH_ROUTE else f"may be paused: {error}"
        return None

    def _change(self, replica: Replica, change: str, reason: str, version: int | None) -> None:
        event = ReplicaChanged(
            t=self._router.clock(), replica=replica.id, change=change, reason=reason, version=version
        )  # fmt: skip
        self._router.put(event)


def _check_adapter(directory: Path) -> None:
    """Look whether a directory is a LoRA adapter as PEFT writes it. Blocking."""
    missing = [n for n in ("adapter_config.json", "adapter_model.safetensors") if not (directory / n).is_file()]
    if missing:
        raise WeightsError(f"{directory}: has no {missing[0]}; give a directory that PEFT saved")
