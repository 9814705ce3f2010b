"""The process bodies of a run, one a kind: each reads the run directory's config and does its part to the end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conf.load import load_config
from conf.schema import Config
from launch import wiring
from launch.addresses import listen_address
from launch.kinds import ORPHAN_TTLS, in_job
from sandbox.limits import Bounds
from sandbox.scratch import owned, sweep
from stages import manifest, open_files
from stages.errors import ManifestError
from stages.http import RouterLink
from stages.identity import member_id
from stages.layout import RunLayout, StoreLayout
from stages.members import present
from stages.wire import ReplicaIn, Stage

if TYPE_CHECKING:  # each kind of process imports what it needs itself: a run's start waits for all their imports
    from sandbox.protocols import SandboxBackend
    from stages.store import LayerStore
    from stages.worker import Stagehand

DRAIN_GRACE_S = 20.0


@dataclass(frozen=True)
class Context:
    """What every body starts from."""

    config: Config
    layout: RunLayout
    member: str
    run_id: str
    number: int = 1


def open_context(kind: str, run_dir: Path, number: int, member: str | None = None) -> Context:
    """Read the run directory; `member` is this incarnation's id, made here where the starter gave none.

    Raises:
        ManifestError: no run directory.
        OpenFilesError: this process may open too few files.
    """
    open_files.ensure()
    layout = RunLayout(run_dir)
    found = manifest.read(layout)
    if found is None:
        raise ManifestError(f"{run_dir} is no run directory: it has no manifest.json")
    return Context(load_config(run_dir), layout, member or member_id(kind, number), found.run_id, number)


async def router(context: Context) -> None:
    """The router."""
    from stages.images import ImageStore
    from stages.ledger.events import Rules
    from stages.router.leasing import Budgets
    from stages.router.replicas import FleetRules
    from stages.router.served import ServedTask
    from stages.router.service import RouterOptions, serve

    config = context.config
    task = wiring.build_task(config)
    agent = wiring.build_agent(config, task)
    served = ServedTask(task, ImageStore(StoreLayout(config.store_path)).digest, privileged_agent=agent.privileged)
    options = RouterOptions(
        run_id=context.run_id,
        member=context.member,
        rules=Rules(
            lease_ttl_s=config.lease.ttl_s,
            max_attempts=config.retry.max_attempts,
            ready_buffer=config.pools.init.ready_buffer,
            max_lag=config.policy.max_lag,
        ),
        sampling=wiring.sampling(config),
        budgets=Budgets(config.budget.init_s, config.budget.run_s, config.budget.eval_s),
        max_open=config.admission.max_open,
        host=listen_address(config),
        callbacks=tuple(config.callbacks.allow),
        prorl=config.compat.prorl,
        gym_row=wiring.gym_row() if config.compat.nemo_gym else None,
        fleet=FleetRules(
            way=config.fleet.policy,
            kv_gate=config.fleet.kv_gate,
            move_above=config.fleet.move_above,
            sync=config.fleet.sync,
            steer=config.pools.run.steer,
            # Engines that are not ours run already; an agent that is handed the answers may need none.
            hold=config.fleet.name != "external" and not agent.privileged,
            allow_tied=config.fleet.name == "embedded",
        ),
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(context.layout, served, options, stop)


async def replica(context: Context) -> None:
    """One engine of the fleet; registers itself with the router."""
    await (_vllm(context) if context.config.fleet.name == "vllm" else _embedded(context))


async def _embedded(context: Context) -> None:
    from stages.engine.main import EngineOptions, serve

    config = context.config
    mode = "processed_logprobs" if config.sampling.logprobs == "processed" else "raw_logprobs"
    options = EngineOptions(
        model=wiring.model_dir(config),
        host=listen_address(config),
        served_model_name=config.fleet.model,
        api_key_file=context.layout.engine_token,
        dev_mode=True,
        logprobs_mode=mode,  # type: ignore[arg-type]
    )
    async with contextlib.AsyncExitStack() as stack:

        async def on_ready(url: str) -> None:
            await stack.enter_async_context(_registered(context, url, options.max_num_seqs))

        await serve(options, on_ready)


async def _vllm(context: Context) -> None:
    key = _engine_key(context) or ""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait(), name="signal")
    serving = asyncio.create_task(_serve_vllm(context, key), name="vllm")
    await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if serving.done():
        serving.result()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def _serve_vllm(context: Context, key: str) -> None:
    from launch.replicas import VLLM_SEQUENCES, vllm_replica

    host = listen_address(context.config)
    async with (
        vllm_replica(context.config, context.number, host=host, api_key=key) as server,
        _registered(context, server.url, VLLM_SEQUENCES),
    ):
        raise await server.broken()


@contextlib.asynccontextmanager
async def _registered(context: Context, url: str, capacity: int) -> AsyncIterator[None]:
    """Known by its member file and by the router."""
    async with (
        RouterLink("worker", run_dir=context.layout.root) as link,
        present(context.layout, "replica", context.member, endpoint=url),
    ):
        body = ReplicaIn(url=url, model=context.config.fleet.model, capacity=capacity, id=context.member)
        await link.call("POST", "/v1/replicas", body, answer=bytes)
        yield


@contextlib.asynccontextmanager
async def _sandboxes(context: Context) -> AsyncIterator[tuple[SandboxBackend, LayerStore, Path]]:
    """The worker's sandbox backend, the layer store, and a scratch directory of its own."""
    from sandbox.choose import choose
    from stages.store import LayerStore

    base = node_scratch(context.config)
    kept = context.config.sandbox.node_gib
    store = LayerStore(
        StoreLayout(context.config.store_path), base / "layers",
        quota_bytes=None if kept is None else int(kept * 2**30), slots=context.config.sandbox.unpack_slots,
    )  # fmt: skip
    await asyncio.to_thread(store.prepare, context.layout.root)
    await asyncio.to_thread(sweep, base)
    with owned(base, f"{context.member}-") as scratch:
        backend = await choose(context.config.sandbox.name, scratch, _bounds(context.config))
        async with backend:
            yield backend, store, scratch


def _bounds(config: Config) -> Bounds:
    """What one sandbox may use, as the sandbox's room knows it."""
    return Bounds(**dataclasses.asdict(config.sandbox.limits))


def node_scratch(config: Config) -> Path:
    """This user's node-local directory, mode 0700.

    Raises:
        ManifestError: somebody else's directory has that name.
    """
    base = Path(config.cluster.scratch or tempfile.gettempdir()) / f"rollmill-{os.getuid()}"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if base.stat().st_uid != os.getuid() or base.is_symlink():
        raise ManifestError(f"{base} belongs to another user; set cluster.scratch to a directory of your own")
    return base


def _worker_link(context: Context) -> RouterLink:
    """A worker's calls. One that no router answers for so long has lost its leases to others: it stops and ends."""
    return RouterLink("worker", run_dir=context.layout.root, patience_s=ORPHAN_TTLS * context.config.lease.ttl_s)


async def _work(context: Context, hand: Stagehand, link: RouterLink, stage: Stage, slots: int) -> None:
    from stages.worker import Worker

    worker = Worker(
        link, hand, member=context.member, stage=stage, slots=slots, heartbeat_s=context.config.lease.heartbeat_s
    )
    async with present(context.layout, stage, context.member):
        await worker.run(grace_s=DRAIN_GRACE_S, term="abandon" if in_job() else "drain")


async def init(context: Context) -> None:
    """One INIT worker."""
    from stages.pools.init import InitHand

    config = context.config
    task = wiring.build_task(config)
    async with (
        _sandboxes(context) as (backend, store, _),
        _worker_link(context) as link,
    ):
        await _work(context, InitHand(task, backend, store), link, "init", config.pools.init.slots)


async def run(context: Context) -> None:
    """One RUN worker."""
    from stages.chat import ChatTokenizer
    from stages.engine_client import EngineClient
    from stages.handoff import SegmentWriter
    from stages.model_files import identify
    from stages.pools.run import Policy, RunHand, Saving

    config = context.config
    task = wiring.build_task(config)
    agent = wiring.build_agent(config, task)
    directory = wiring.model_dir(config)
    chat = await asyncio.to_thread(ChatTokenizer.load, directory)
    identity = await asyncio.to_thread(identify, config.fleet.model, directory, chat)
    async with (
        _sandboxes(context) as (backend, store, scratch),
        _worker_link(context) as link,
        EngineClient(api_key=_engine_key(context)) as engine,
        SegmentWriter(context.layout, context.member) as segments,
    ):
        hand = RunHand(
            task, agent, wiring.limits(config), Policy(chat, identity, config.sampling.logprobs),
            backend=backend, store=store, engine=engine, link=link, segments=segments,
            saving=Saving(context.layout, scratch, config.checkpoint.turns or 0, config.fs.visibility_s),
        )  # fmt: skip
        await _work(context, hand, link, "run", config.pools.run.slots)


async def evaluate(context: Context) -> None:
    """One EVAL worker."""
    from stages.pools.eval import EvalHand, RunNames
    from stages.shards.writer import ShardWriter

    config = context.config
    task = wiring.build_task(config)
    names = RunNames(context.run_id, config.workflow.name, task.name, config.agent.name, config.shards.messages)
    async with (
        _sandboxes(context) as (backend, store, scratch),
        _worker_link(context) as link,
        ShardWriter(context.layout, context.member) as shards,
    ):
        hand = EvalHand(
            task, names, context.layout, backend=backend, store=store, shards=shards, scratch=scratch,
            visibility_s=config.fs.visibility_s,
        )  # fmt: skip
        await _work(context, hand, link, "eval", config.pools.eval.slots)


async def trainer(context: Context) -> None:
    """The reference trainer."""
    from launch.training import trainer as train

    await train(context)


def _engine_key(context: Context) -> str | None:
    path = context.layout.engine_token
    return path.read_text().strip() if path.exists() else None


BODIES: dict[str, Callable[[Context], Awaitable[None]]] = {
    "router": router,
    "replica": replica,
    "init": init,
    "run": run,
    "eval": evaluate,
    "trainer": trainer,
}
