"""The router's process body: claim the run, serve, publish where it is, watch the fleet, leave in order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec

from stages import beacon, control, sharedfs
from stages.beacon import Beacon
from stages.engine_control import EngineControl, EngineControlError, check_weights
from stages.errors import FencedError
from stages.http import Client, InvalidURL, TransportError
from stages.identity import here, slurm_job_id
from stages.journal.history import is_fenced
from stages.journal.writer import STALL_S
from stages.layout import RunLayout
from stages.ledger.events import Cancelled, Draining, Rules
from stages.members import present
from stages.router.app import Service, create_app
from stages.router.auth import Tokens
from stages.router.callbacks import Callbacks
from stages.router.compat_gym import GymRow
from stages.router.core import Router
from stages.router.leasing import Budgets, Leasing
from stages.router.policy import PolicyKeeper
from stages.router.readings import Reading, reading_of
from stages.router.replicas import FleetRules, Probe, Read, Replicas
from stages.router.rollouts import Rollouts
from stages.router.served import ServedTask
from stages.trajectory import Sampling
from stages.web import serve_app

PROBE_TIMEOUT_S = 2.0
CONTROL_S = 1.0
HEARD_TTLS = 2
"""Lease times without a word after which a worker is no longer shown."""


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the config says to a router."""

    run_id: str
    member: str
    rules: Rules
    sampling: Sampling
    budgets: Budgets
    max_open: int
    host: str = "127.0.0.1"
    stall_s: float = STALL_S
    fleet: FleetRules = FleetRules()
    callbacks: tuple[str, ...] = ()
    """URL prefixes that callbacks may go to."""
    prorl: bool = False
    gym_row: GymRow | None = None
    """Makes NeMo Gym's rows; its route is there where this is."""


@contextlib.asynccontextmanager
async def health_probe() -> Any:
    """A probe that asks `GET /health` of a replica."""
    async with Client(connections=64, timeout_s=PROBE_TIMEOUT_S) as client:

        async def probe(url: str) -> bool:
            try:
                return (await client.get(f"{url}/health")).status_code == 200
            except (TransportError, InvalidURL):
                return False

        yield probe


async def serve(layout: RunLayout, served: ServedTask, options: RouterOptions, stop: asyncio.Event) -> None:
    """Be the run's router until `stop` is set.

    Raises:
        StageError: another router is alive, or took over (FencedError), or the history is damaged.
    """
    await beacon.wait_until_free(layout, options.rules.lease_ttl_s)
    node = here().node
    async with (
        health_probe() as probe,
        EngineControl(api_key=await asyncio.to_thread(_engine_key, layout)) as engines,
        Router.opened(layout, options.run_id, options.rules, node, stall_s=options.stall_s) as router,
    ):
        service = _service(router, served, options, probe, engines)
        app = create_app(service.http, Tokens(layout), prorl=options.prorl, gym_row=options.gym_row)
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def on_ready(listening: str) -> None:
            url.set_result(listening)

        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve_app(app, options.host, 0, on_ready), name="http")
            found = Beacon(router.epoch, await url, node, here().pid, 0, False, slurm_job_id(), here().boot, _pid_ns())
            router.url = found.url
            async with present(layout, "router", options.member, endpoint=found.url, epoch=router.epoch):
                background = [
                    tasks.create_task(_beat(layout, router, found, options.rules.lease_ttl_s / 5), name="beat"),
                    tasks.create_task(service.replicas.watch(), name="probes"),
                    tasks.create_task(_obey(layout, router, service.leasing), name="control"),
                    tasks.create_task(service.callbacks.run(), name="callbacks"),
                ]
                await stop.wait()
                router.stop()
                for task in (*background, serving):
                    task.cancel()
        last = msgspec.structs.replace(found, beat=found.beat + 1, ended=True)
    await asyncio.to_thread(beacon.write, layout, last)


def _pid_ns() -> str:
    return here().pid_namespace


class _Parts(msgspec.Struct, frozen=True):
    http: Service
    replicas: Replicas
    leasing: Leasing
    callbacks: Callbacks


def _engine_key(layout: RunLayout) -> str | None:
    path = layout.engine_token
    return sharedfs.read_bytes(path).decode().strip() if sharedfs.exists(path) else None


def _reader(engines: EngineControl) -> Read:
    async def read(url: str) -> Reading | None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return reading_of(await engines.metrics(url))
        except (EngineControlError, TimeoutError):
            return None

    return read


def _service(
    router: Router, served: ServedTask, options: RouterOptions, probe: Probe, engines: EngineControl
) -> _Parts:
    rollouts = Rollouts(router, served, options.sampling, options.max_open)
    callbacks = Callbacks(router, options.callbacks)
    rollouts.check_callback = callbacks.check
    leasing = Leasing(router, served, options.sampling, options.budgets)
    replicas = Replicas(router, probe, _reader(engines), options.fleet)
    replicas.policy = PolicyKeeper(
        router, engines, sync=options.fleet.sync, woken=replicas.woken,
        check=functools.partial(check_weights, allow_tied=options.fleet.allow_tied),
    )  # fmt: skip
    router.run_room = replicas.run_room
    leasing.run_room, leasing.uneasy = replicas.run_room, replicas.uneasy
    leasing.offer, leasing.session = replicas.offer, replicas.described
    http = Service(router, rollouts, leasing, replicas, _members(router, leasing))
    return _Parts(http, replicas, leasing, callbacks)


def _members(router: Router, leasing: Leasing) -> Callable[[], list[dict[str, Any]]]:
    def listing() -> list[dict[str, Any]]:
        """Who was heard of lately: one that left in order, or with its node, is in the ledger still."""
        held, since = router.ledger.state.members, time.monotonic() - HEARD_TTLS * router.ledger.state.rules.lease_ttl_s
        return [
            {
                "id": member, "kind": member.partition("-")[0], "leases": len(held.get(member, {})),
                **leasing.loads.get(member, {}),
            }
            for member, heard in leasing.heard.items()
            if heard > since
        ]  # fmt: skip

    return listing


async def _beat(layout: RunLayout, router: Router, found: Beacon, every_s: float) -> None:
    """Publish where the router is, again and again: a beat that stands still is a router that may be replaced."""
    for beat in itertools.count(1):
        with contextlib.suppress(OSError):  # the next beat tries again; the fence does not depend on it
            # A router that was stopped and woke up must not point anybody to itself.
            if await asyncio.to_thread(is_fenced, layout, router.epoch):
                raise FencedError(f"epoch {router.epoch} is over: a newer router has claimed {layout.root}")
            began = router.fence.now()
            await asyncio.to_thread(beacon.write, layout, msgspec.structs.replace(found, beat=beat))
            router.fence.beaten(began)
        await asyncio.sleep(min(2.0, every_s))


async def _obey(layout: RunLayout, router: Router, leasing: Leasing) -> None:
    """Follow the requests that lie in control/: they outlive routers, and whoever starts the run anew clears them."""
    while True:
        with contextlib.suppress(OSError):  # the next look tries again
            cancel = await asyncio.to_thread(control.pending, layout, "cancel")
            reason = await asyncio.to_thread(control.message, layout, "drain")
            drain, leasing.hand_over = cancel or reason is not None, reason == control.TOLD_BY_SLURM
            if drain != router.ledger.state.draining:
                router.put(Draining(t=router.clock(), on=drain))
            if cancel and router.ledger.state.groups:
                groups = list(router.ledger.state.groups)
                router.put(Cancelled(t=router.clock(), groups=groups, reason="the run was cancelled"))
        await asyncio.sleep(CONTROL_S)
